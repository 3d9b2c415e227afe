// Long sequences of bf16 by transforms of the whole (whole.cuh).
#pragma once

#include "flashgla/base/context.h"
#include "flashgla/ops/long_convolution/cuda/call.cuh"

namespace flashgla::ops::long_convolution {

constexpr std::int64_t kLongestWhole = 32768;

// y, or with `gradients` dx, of `from`, for sequences of at most `longest` tokens with those before the call.
void queue_whole(Context& context, const cuda::Call<__nv_bfloat16>& call, std::int64_t longest, const TensorView& from,
                 const TensorView& to, bool gradients);

}  // namespace flashgla::ops::long_convolution
