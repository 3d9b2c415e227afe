// Dropout with the sum that follows it. Srivastava et al. 2014, "Dropout: a simple way to prevent neural networks from
// overfitting"; scaled while training, so that nothing is to be done afterwards.
//
//     out = residual + m x / (1 - p),   m = 0 with probability p, else 1, for each element
//
// Which elements fall out is a function of (seed, step, micro-batch, place, element) alone: the same whenever it is
// asked for again, on every device, in a captured graph (step and micro-batch lie in the device's memory) and after a
// resume. The gradient of x is the same function of that of out, without a residual.
#pragma once

#include <cstdint>

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"

namespace flashgla::ops::dropout {

struct Mask {
  double probability = 0.0;  // p in [0, 1), rounded to a multiple of 2^-16, as then is the factor
  std::uint64_t seed = 0;
  std::int64_t place = 0;  // in the model; 0 to 65535
  TensorView step;         // f64 [1]: a whole number below 2^32
  TensorView micro_batch;  // i32 [1]: 0 to 65535
};

// x, residual and out of one shape and dtype (f64, f32, bf16, f16), contiguous; arithmetic in f32 (f64 with f64).
// residual absent: out = m x / (1 - p). out may be x or residual. Throws Error naming the argument.
void run(Context& context, const TensorView& x, const TensorView& residual, const TensorView& out, const Mask& mask);

}  // namespace flashgla::ops::dropout
