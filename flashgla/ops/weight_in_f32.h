// A parameter vector in f32, so that kernels need not be compiled for each of its dtypes.
#pragma once

#include <algorithm>

#include "flashgla/ops/elementwise/elementwise.h"

namespace flashgla::ops {

// [length] f32 on the context's device: the weight itself or a copy in scratch; ones when it is absent, on the CPU
// alone. Lives as long as the caller's ArenaScope.
inline const float* weight_in_f32(Context& context, const TensorView& weight, std::int64_t length) {
  if (weight && weight.dtype == DType::f32) return weight.as<float>();
  const TensorView copy = context.scratch().tensor(Shape({length}), DType::f32, "weight in f32");
  if (weight) {
    elementwise::convert(context, weight, copy);
  } else if (!context.planning()) {
    std::fill_n(copy.as<float>(), length, 1.0f);
  }
  return copy.as<float>();
}

}  // namespace flashgla::ops
