#include "flashgla/base/cut.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "flashgla/base/team.h"

namespace flashgla {
namespace {

struct Matrix {
  std::int64_t rows, at_once;
};

Cut cut_of(const std::vector<Matrix>& matrices, int threads) {
  Cut cut;
  for (const Matrix& matrix : matrices) cut.add(matrix.rows, matrix.at_once);
  cut.share_out(threads);
  return cut;
}

const std::vector<std::vector<Matrix>> kRegions = {{{1, 1}},
                                                   {{0, 4}, {3, 4}},
                                                   {{1024, 16}, {1024, 16}, {16, 16}},
                                                   {{64, 4}, {176, 4}, {16, 16}, {5, 1}, {1, 1}},
                                                   {{100003, 8}, {2, 1}}};
const int kThreads[] = {1, 2, 3, 7, 16, 64, 100};

TEST(Cut, EachRowIsOfOneTaskOfTheShareThatOwnsIt) {
  for (const auto& matrices : kRegions) {
    for (const int threads : kThreads) {
      const Cut cut = cut_of(matrices, threads);
      std::vector<std::vector<int>> times(matrices.size());
      for (std::size_t i = 0; i < matrices.size(); ++i) times[i].resize(static_cast<std::size_t>(matrices[i].rows));
      for (int share = 0; share < cut.shares(); ++share) {
        for (std::int64_t task = cut.first_task(share); task < cut.first_task(share + 1); ++task) {
          cut.for_each(task, task + 1, [&](std::size_t matrix, std::int64_t begin, std::int64_t end) {
            const Cut::Rows own = cut.rows_of(matrix, share);
            EXPECT_GE(begin, own.begin);
            EXPECT_LE(end, own.end);
            EXPECT_LT(begin, end);
            EXPECT_LE(end - begin, matrices[matrix].at_once);
            for (std::int64_t row = begin; row < end; ++row) ++times[matrix][static_cast<std::size_t>(row)];
          });
        }
      }
      for (const auto& of_matrix : times) {
        EXPECT_TRUE(std::all_of(of_matrix.begin(), of_matrix.end(), [](int count) { return count == 1; }));
      }
    }
  }
}

TEST(Cut, RangesOfTasksAreTheirRowsTogether) {
  const Cut cut = cut_of(kRegions[3], 7);
  for (int share = 0; share < cut.shares(); ++share) {
    std::map<std::size_t, std::int64_t> rows;
    cut.for_each(cut.first_task(share), cut.first_task(share + 1),
                 [&](std::size_t matrix, std::int64_t begin, std::int64_t end) { rows[matrix] += end - begin; });
    for (std::size_t i = 0; i < cut.matrices(); ++i) {
      const Cut::Rows own = cut.rows_of(i, share);
      EXPECT_EQ(rows[i], own.end - own.begin);
    }
  }
}

TEST(Cut, AMatrixIsCutAlikeWhateverIsBesideIt) {
  const Cut alone = cut_of({{1000, 4}}, 16), beside = cut_of({{77, 1}, {1000, 4}, {3, 1}}, 16);
  for (int share = 0; share < 16; ++share) {
    EXPECT_EQ(alone.rows_of(0, share).begin, beside.rows_of(1, share).begin);
    EXPECT_EQ(alone.rows_of(0, share).end, beside.rows_of(1, share).end);
  }
}

// Of gla-340m in 16-bit weights: q, k, v and a low-rank gate behind one another, g; gate and up; the head.
TEST(Cut, SharesOfAModelsRegionsDifferByLessThanAPercent) {
  for (const int threads : {2, 4, 6, 8, 16}) {
    for (const std::vector<Matrix>& region : {std::vector<Matrix>{{2064, 16}, {1024, 16}},
                                              std::vector<Matrix>{{2816, 8}}, std::vector<Matrix>{{32000, 16}}}) {
      const Cut cut = cut_of(region, threads);
      ASSERT_EQ(cut.shares(), threads);
      std::int64_t all = 0, most = 0;
      for (int share = 0; share < threads; ++share) {
        std::int64_t own = 0;
        for (std::size_t i = 0; i < region.size(); ++i) own += cut.rows_of(i, share).end - cut.rows_of(i, share).begin;
        all += own;
        most = std::max(most, own);
      }
      EXPECT_LE(static_cast<double>(most * threads), 1.01 * static_cast<double>(all)) << threads << " threads";
    }
  }
}

TEST(Cut, ATeamRunsEachRowOnce) {
  for (const auto& matrices : kRegions) {
    for (const int threads : {1, 2, 3, 7}) {
      for (int again = 0; again < 50; ++again) {
        std::vector<std::vector<int>> times(matrices.size());
        for (std::size_t i = 0; i < matrices.size(); ++i) times[i].resize(static_cast<std::size_t>(matrices[i].rows));
        run_on_team(cut_of(matrices, threads), [&](std::size_t matrix, std::int64_t begin, std::int64_t end) {
          for (std::int64_t row = begin; row < end; ++row) ++times[matrix][static_cast<std::size_t>(row)];
        });
        for (const auto& of_matrix : times) {
          EXPECT_TRUE(std::all_of(of_matrix.begin(), of_matrix.end(), [](int count) { return count == 1; }));
        }
      }
    }
  }
}

TEST(Cut, WhereNobodyHelpsEachThreadDoesItsShareEveryTime) {
  constexpr int kShares = 5;
  const Cut cut = cut_of({{100, 1}, {37, 4}}, kShares);
  const auto threads_of_rows = [&] {
    std::vector<std::thread::id> first(100), second(37);
    const NobodyHelps each_its_own;
    run_on_team(cut, [&](std::size_t matrix, std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        (matrix == 0 ? first : second)[static_cast<std::size_t>(row)] = std::this_thread::get_id();
      }
    });
    first.insert(first.end(), second.begin(), second.end());
    return first;
  };
  const auto once = threads_of_rows();
  for (int share = 0; share < kShares; ++share) {
    const Cut::Rows own = cut.rows_of(0, share);
    for (std::int64_t row = own.begin; row < own.end; ++row) {
      EXPECT_EQ(once[static_cast<std::size_t>(row)], once[static_cast<std::size_t>(own.begin)]);
    }
  }
  EXPECT_EQ(once.front(), std::this_thread::get_id());
  for (int again = 0; again < 20; ++again) EXPECT_EQ(threads_of_rows(), once);
}

}  // namespace
}  // namespace flashgla
