// What the plan has to know of kernels: shared memory that their blocks need.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/params.h"

namespace flashgla::ops::gated_linear_attention::cuda {

// Of the forward in one pass, a warpgroup.
constexpr int kOnePassSharedBytes = 7 * static_cast<int>(kImageBytes);

// Of the backward in one kernel, at most; devices with less go by chunks.
constexpr int kFusedSharedBytes = 113 * 1024;

// Of the backward in f32 tiles; devices with less go token by token.
constexpr int split_gradients_shared(int parts, bool grouped) {
  return parts * 3 * static_cast<int>(kImageBytes) + (grouped ? 3 : 2) * kTile * kTile * 4 + 15 * kTile * 4;
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
