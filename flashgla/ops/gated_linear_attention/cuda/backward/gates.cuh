// Gates of a chunk, for a group of 128 threads that walks it by columns: warp w takes tokens 16w..16w+15, lane l of it
// channels 2l and 2l+1. b_t = sum of the chunk's base-2 log gates up to and including token t.
//
// The ladder: a 64-channel tile of a chunk is steep when one of its channels decays by more than 2^kSteep. In the
// others q~_t = scale q_t 2^b_t and k~_t = k_t 2^-b_t are bf16 numbers without overflow, all products are plain matrix
// products, and q~_i k~_j = q_i k_j 2^(b_i - b_j). Steep ones keep exponents <= 0 and take the pairs inside the chunk
// by halving (tiles/halving.cuh).
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/backward/launch.h"
#include "flashgla/ops/gated_linear_attention/cuda/tiles/halving.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/tiles/ladder.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

constexpr int kFusedThreads = 2 * kGroupThreads;  // of the backward in one kernel

constexpr float kSteep = 80.0f;

constexpr int gate_bytes(GateTile gate) {
  return gate == GateTile::wide ? 16384 : gate == GateTile::narrow ? kTileBytes : gate == GateTile::token ? 256 : 0;
}

// Base-2 log gates of a token, two channels.
template <GateTile kGate>
__device__ __forceinline__ float2 gate_at(const char* gates, int row, int lane) {
  float2 g = make_float2(0.0f, 0.0f);
  if constexpr (kGate == GateTile::none) return g;
  if constexpr (kGate == GateTile::token) {
    g.x = g.y = reinterpret_cast<const float*>(gates)[row];
  } else if constexpr (kGate == GateTile::narrow) {
    g = ptx::unpack_bf16(*reinterpret_cast<const std::uint32_t*>(gates + element_offset(row, 2 * lane)));
  } else {
    g = *reinterpret_cast<const float2*>(gates + row * 256 + lane * 8);
  }
  return make_float2(ptx::larger_or_nan(g.x * kLog2E, kStrongest), ptx::larger_or_nan(g.y * kLog2E, kStrongest));
}

// The gates of a chunk for halving, as they lie in shared memory; totals: [kWarpsIn][64], sums over the warps' rows.
template <GateTile kGate, int kWarpsIn>
struct GateColumns {
  static constexpr int kWarps = kWarpsIn, kRows = kTile / kWarps;
  const char* gates;
  const float* totals;
  int warp, lane;
  __device__ __forceinline__ float2 gate(int i) const { return gate_at<kGate>(gates, kRows * warp + i, lane); }
  __device__ __forceinline__ float2 total(int w) const {
    return *reinterpret_cast<const float2*>(totals + w * kTile + 2 * lane);
  }
};

using ColumnParts = float[4][kTile];  // one value a warp and channel

// Sums of the four quarters of the chunk. Barrier before use.
template <GateTile kGate>
__device__ __forceinline__ void sum_quarters(ColumnParts& parts, const char* gates, int thread) {
  const int warp = thread >> 5, lane = thread & 31;
  float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float2 g = gate_at<kGate>(gates, 16 * warp + i, lane);
    sum.x += g.x;
    sum.y += g.y;
  }
  *reinterpret_cast<float2*>(&parts[warp][2 * lane]) = sum;
}
// b before the warp's first token; with warp 4, of the whole chunk.
__device__ __forceinline__ float2 sum_before(const ColumnParts& parts, int warp, int lane) {
  float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const float2 part = *reinterpret_cast<const float2*>(&parts[w][2 * lane]);
    if (w < warp) {
      sum.x += part.x;
      sum.y += part.y;
    }
  }
  return sum;
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
