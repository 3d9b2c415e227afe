// The learning rate over a run: linear warm-up, then a cosine down to the final rate (Yang et al. 2024, section 5.1).
#pragma once

#include <cstdint>

namespace flashgla::train {

struct Schedule {
  double initial = 3e-5;
  double peak = 3e-4;
  double final = 3e-5;
  std::int64_t warmup_steps = 0;
  std::int64_t total_steps = 1;

  // Rate of update `step`, counted from 0: `initial` at 0, `peak` at warmup_steps, `final` at total_steps - 1 and
  // after.
  double learning_rate(std::int64_t step) const;
};

}  // namespace flashgla::train
