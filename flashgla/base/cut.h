// Which thread reads which rows of the matrices that a region streams from memory. One rule for all who read them, and
// for who writes their pages first: on a machine with several memory nodes a page then lies beside its reader.
//
// Each matrix is cut by itself: of n shares, s begins with rows [rows s / n, rows (s + 1) / n). So what a thread reads
// of a matrix depends neither on those beside it nor on how many follow each other in memory without a gap.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace flashgla {

// Rows that are worth taking at once: some 32 KB, and a multiple of the four that kernels walk through side by side.
constexpr std::int64_t rows_at_once(std::int64_t row_bytes) {
  constexpr std::int64_t kBytes = 32 * 1024, kSideBySide = 4;
  return std::max<std::int64_t>(1, kBytes / (std::max<std::int64_t>(1, row_bytes) * kSideBySide)) * kSideBySide;
}

class Cut {
 public:
  static constexpr std::size_t kMostMatrices = 8;
  static constexpr int kMostShares = 64;

  struct Rows {
    std::int64_t begin = 0, end = 0;
  };

  // A matrix more, whose rows (or panels of them) are taken `at_once`.
  void add(std::int64_t rows, std::int64_t at_once);
  // After the last of them: into as many shares as there are threads, but no more than there are tasks.
  void share_out(int threads);

  std::size_t matrices() const { return count_; }
  std::int64_t rows(std::size_t matrix) const { return matrices_[matrix].rows; }
  int shares() const { return shares_; }
  // That work on it: those that have a share, and where there are as many shares as can be, all.
  int threads() const { return threads_; }

  Rows rows_of(std::size_t matrix, int share) const {
    const std::int64_t rows = matrices_[matrix].rows;
    return {rows * share / shares_, rows * (share + 1) / shares_};
  }

  // Tasks are numbered share by share, and within a share matrix by matrix.
  std::int64_t tasks() const { return first_task(shares_); }
  std::int64_t first_task(int share) const { return first_tasks_[static_cast<std::size_t>(share)]; }

  // body(matrix, begin, end) for the rows of tasks [begin, end), which are one share's.
  template <class Body>
  void for_each(std::int64_t begin, std::int64_t end, Body&& body) const {
    const auto* const after = std::upper_bound(first_tasks_.data(), first_tasks_.data() + shares_, begin);
    const auto share = static_cast<int>(after - first_tasks_.data()) - 1;
    begin -= first_task(share);
    end -= first_task(share);
    for (std::size_t matrix = 0; matrix < count_ && end > 0; ++matrix) {
      const Rows own = rows_of(matrix, share);
      const std::int64_t at_once = matrices_[matrix].at_once;
      const std::int64_t tasks = (own.end - own.begin + at_once - 1) / at_once;
      if (begin < tasks) {
        body(matrix, own.begin + std::max<std::int64_t>(begin, 0) * at_once,
             std::min(own.begin + end * at_once, own.end));
      }
      begin -= tasks;
      end -= tasks;
    }
  }

 private:
  struct Matrix {
    std::int64_t rows = 0, at_once = 1;
  };

  std::array<Matrix, kMostMatrices> matrices_{};
  std::size_t count_ = 0;
  int shares_ = 1, threads_ = 1;
  std::array<std::int64_t, kMostShares + 1> first_tasks_{};
};

}  // namespace flashgla
