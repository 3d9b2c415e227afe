// What kernels that make dq, dk and dg of a chunk and 64 key channels share:
// which tiles go by blocks, and sums over tokens and channels.
//
// A 64-channel tile of a chunk is steep when one of its channels decays by more than 2^kSteep. In the others, with b_t
// the sum of the chunk's base-2 log gates up to and including token t, q~_t = scale q_t 2^b_t and k~_t = k_t 2^-b_t are
// bf16 numbers without overflow, all products are plain matrix products, and q~_i k~_j = q_i k_j 2^(b_i - b_j). Steep
// ones go by blocks (tiles/ladder.cuh).
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/backward/by_blocks.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/backward/launch.h"
#include "flashgla/ops/gated_linear_attention/cuda/tiles/anchors.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

constexpr int kFusedThreads = 2 * kGroupThreads;  // of the backward in one kernel

constexpr float kSteep = 80.0f;

using ColumnParts = float[4][kTile];  // one value a warp and channel

// Columns' sums over the chunk of a tile times an accumulator, by warp.
__device__ __forceinline__ void sum_beyond(ColumnParts& parts, const char* tile, const Accumulator& a, int thread) {
  std::uint32_t x[16];
  load_operand<Stored::k_inner>(x, ptx::shared_address(tile), thread);
  *reinterpret_cast<float2*>(&parts[thread >> 5][2 * (thread & 31)]) = sum_over_rows(a, thread & 31, two_of_operand(x));
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
