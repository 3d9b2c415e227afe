// Long sequences of bf16 by transforms of the whole (whole.cuh, up to 16,384 tokens halves.cuh).
#pragma once

#include <cstddef>

#include "flashgla/base/context.h"
#include "flashgla/ops/long_convolution/cuda/call.cuh"

namespace flashgla::ops::long_convolution {

constexpr std::int64_t kLongestWhole = 32768;

// Forward x, the skip and y; backward x, the skip, dy, dx, dfilter [L,D] and dskip, to which is added.
struct WholeViews {
  TensorView x, skip, y, dy, dx;
  float* dfilter = nullptr;
  TensorView dskip;
  TensorView kept;  // u8 [kept_of_whole], where forward puts what backward reads then; absent: backward makes it again
};

// Bytes of WholeViews::kept, of `lines` sequences of at most `longest` tokens.
std::size_t kept_of_whole(std::int64_t lines, std::int64_t channels, std::int64_t longest);

// y, or where there is dy gradients, of sequences of at most `longest` tokens with those before the call. Sequences
// that are left to direct sums add nothing to dfilter and dskip.
void queue_whole(Context& context, const cuda::Call<__nv_bfloat16>& call, std::int64_t longest,
                 const WholeViews& views);

}  // namespace flashgla::ops::long_convolution
