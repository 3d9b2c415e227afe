// The softmax of a row whose scores come tile by tile: Milakov and Gimelshein 2018, "Online normalizer calculation for
// softmax".
#pragma once

#include "flashgla/base/cuda/ptx.cuh"

namespace flashgla::ops::softmax_attention::cuda {

// Of a thread's two rows: it and the three lanes beside it have a row's scores, four elements 8j + {0, 1} of the first
// row, + {2, 3} of the second, as accumulators of matrix units lie.
struct OnlineSoftmax {
  float largest[2] = {-INFINITY, -INFINITY};  // score times scale
  float sum[2] = {0.0f, 0.0f};                // this thread's part of the row

  // Scores become their weights; factor: what earlier sums are to be multiplied by. Rows that have seen no key yet keep
  // a sum of zero. Largest and sums go in chains of their own, which do not wait for each other.
  template <int E>
  __device__ __forceinline__ void step(float (&s)[E], float scale, float (&factor)[2]) {
    float most[4], base[2], total[4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) most[j] = s[j];
#pragma unroll
    for (int e = 4; e < E; ++e) most[e % 4] = fmaxf(most[e % 4], s[e]);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float x = fmaxf(most[2 * row], most[2 * row + 1]);
      x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
      x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
      x = fmaxf(largest[row], x * scale);
      base[row] = x == -INFINITY ? 0.0f : x;
      factor[row] = ptx::exp2(largest[row] - base[row]);
      largest[row] = x;
    }
#pragma unroll
    for (int e = 0; e < E; ++e) {
      s[e] = ptx::exp2(s[e] * scale - base[e / 2 % 2]);
      total[e % 4] += s[e];
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) sum[row] = sum[row] * factor[row] + (total[2 * row] + total[2 * row + 1]);
  }
};

}  // namespace flashgla::ops::softmax_attention::cuda
