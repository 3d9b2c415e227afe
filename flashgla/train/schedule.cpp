#include "flashgla/train/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace flashgla::train {

double Schedule::learning_rate(std::int64_t step) const {
  if (step < warmup_steps) {
    return initial + (peak - initial) * static_cast<double>(step) / static_cast<double>(warmup_steps);
  }
  const std::int64_t decay_steps = total_steps - 1 - warmup_steps;
  if (decay_steps <= 0) return step > warmup_steps ? final : peak;
  const double share = std::min(1.0, static_cast<double>(step - warmup_steps) / static_cast<double>(decay_steps));
  return final + 0.5 * (peak - final) * (1.0 + std::cos(std::numbers::pi * share));
}

}  // namespace flashgla::train
