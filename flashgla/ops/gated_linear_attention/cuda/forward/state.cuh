// The state of 64 value channels by 64 key channels as an accumulator whose rows are value channels.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/tiles/tile.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// From and to an f32 state [K,V]; `key` and `value` are the tile's first channels. A warp's access is four rows of
// eight neighbours, whole sectors of memory.
template <bool store>
__device__ __forceinline__ void move_transposed_state(Accumulator& h, float* state, int K, int V, int key, int value,
                                                      int thread) {
  const int lane = thread % 32, row = value + thread / 32 * 16 + lane / 4, column = key + 2 * (lane % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half >= V) continue;
    float* at = state + static_cast<std::int64_t>(column) * V + row + 8 * half;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float &x = h[4 * j + 2 * half], &y = h[4 * j + 2 * half + 1];
      if (column + 8 * j < K) store ? * at = x : x = *at;
      if (column + 8 * j + 1 < K) store ? at[V] = y : y = at[V];
      at += 8 * V;
    }
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
