#include "flashgla/base/cut.h"

namespace flashgla {

void Cut::add(std::int64_t rows, std::int64_t at_once) {
  constexpr std::int64_t kMostTasks = std::int64_t{1}
                                      << 16;  // of a matrix, so that a share's can be counted in 20 bits
  matrices_[count_++] = {rows, std::max({std::int64_t{1}, at_once, rows / kMostTasks})};
}

void Cut::share_out(int threads) {
  const auto tasks_of = [](std::int64_t rows, std::int64_t at_once) { return (rows + at_once - 1) / at_once; };
  std::int64_t tasks = 0;
  for (std::size_t i = 0; i < count_; ++i) tasks += tasks_of(matrices_[i].rows, matrices_[i].at_once);
  threads_ = static_cast<int>(std::clamp<std::int64_t>(threads, 1, std::max<std::int64_t>(1, tasks)));
  shares_ = std::min(threads_, kMostShares);
  first_tasks_.fill(0);
  for (std::size_t i = 0; i < count_; ++i) {
    const Matrix& matrix = matrices_[i];
    // A share has `fewer` rows or one more; rest counts where rows s / shares becomes a whole number more.
    const std::int64_t fewer = matrix.rows / shares_, over = matrix.rows % shares_;
    const std::int64_t tasks_of_fewer = tasks_of(fewer, matrix.at_once);
    const std::int64_t tasks_of_more = tasks_of(fewer + 1, matrix.at_once);
    std::int64_t rest = 0, before = 0;
    for (int share = 0; share < shares_; ++share) {
      rest += over;
      before += rest >= shares_ ? tasks_of_more : tasks_of_fewer;
      if (rest >= shares_) rest -= shares_;
      first_tasks_[static_cast<std::size_t>(share) + 1] += before;
    }
  }
}

}  // namespace flashgla
