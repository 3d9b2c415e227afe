// Gates of a 64x64 tile (64 tokens, 64 key channels), and the stability ladder of the scores
//     P_ij = sum_k q_ik k_jk 2^(G_ik - G_jk), i >= j,   G the running sum of the gates, base 2, over the chunk.
//
// One anchor, the chunk's start, while no channel of 64 falls by more than kRange bits: q 2^G times k 2^-G, a plain
// product. Entries above the diagonal may be as large as 2^kRange; they are selected away. Else by blocks of 16 tokens
// (tiles/ladder.cuh), exact for any gates. Decided for a chunk and 64 channels, from the data.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/tiles/ladder.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/tiles/pieces.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// Bits a channel may fall within one anchor's reach: 2^60 q.k stays far from overflow in f32 and bf16, and the running
// sum's rounding, 60 * 2^-24 * 8, far below bf16's.
constexpr float kRange = 60.0f;

// This thread's gates: tokens 4 (thread / 8) + i, channels 8 (thread % 8) + e, base 2.
using Gates = float[kRowsEach][8];

__device__ __forceinline__ void unpack_gates(float (&g)[8], const uint4& raw) {
  unpack_8(raw, g);
#pragma unroll
  for (int e = 0; e < 8; ++e) g[e] = base_2_gate(g[e]);
}

// This thread's gates from a tile of bf16.
__device__ __forceinline__ void read_gates(Gates& g, std::uint32_t tile, int thread) {
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    unpack_gates(g[i], load_shared_16(tile + own_piece(thread, i)));
  }
}

// Totals of the four warps, 64 floats each, lie in pieces of a tile that the writing thread owns.
__device__ __forceinline__ std::uint32_t total_piece(std::uint32_t tile, int warp, int half, int piece) {
  return tile + tile_piece(16 * warp + 12 + half, piece);
}

// Before the barrier: running sums over this thread's tokens in place, `before` the sum over earlier tokens of the
// warp, and the warp's totals to shared memory.
__device__ __forceinline__ void scan_gates(Gates& g, float (&before)[8], std::uint32_t totals, int thread) {
  const int lane = thread % 32;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
#pragma unroll
    for (int i = 1; i < kRowsEach; ++i) g[i][e] += g[i - 1][e];
    float sum = g[kRowsEach - 1][e];
    float other = __shfl_up_sync(0xffffffffu, sum, 8);
    sum += lane >= 8 ? other : 0.0f;
    other = __shfl_up_sync(0xffffffffu, sum, 16);
    sum += lane >= 16 ? other : 0.0f;
    other = __shfl_up_sync(0xffffffffu, sum, 8);
    before[e] = lane >= 8 ? other : 0.0f;
  }
  if (lane >= 24) {
    float total[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) total[e] = before[e] + g[kRowsEach - 1][e];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      store_shared_16(total_piece(totals, thread / 32, half, thread % 8),
                      make_uint4(__float_as_uint(total[4 * half]), __float_as_uint(total[4 * half + 1]),
                                 __float_as_uint(total[4 * half + 2]), __float_as_uint(total[4 * half + 3])));
    }
  }
}

// After the barrier: g becomes the sum from the chunk's start; `all` is the sum over the chunk.
__device__ __forceinline__ void add_total(float (&sum)[8], std::uint32_t totals, int warp, int thread) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4 raw = load_shared_16(total_piece(totals, warp, half, thread % 8));
    sum[4 * half] += __uint_as_float(raw.x);
    sum[4 * half + 1] += __uint_as_float(raw.y);
    sum[4 * half + 2] += __uint_as_float(raw.z);
    sum[4 * half + 3] += __uint_as_float(raw.w);
  }
}
__device__ __forceinline__ void finish_scan(Gates& g, float (&before)[8], float (&all)[8], std::uint32_t totals,
                                            int thread) {
#pragma unroll
  for (int e = 0; e < 8; ++e) all[e] = 0.0f;
#pragma unroll
  for (int w = 0; w < kGroupThreads / 32; ++w) {
    if (w == thread / 32) {
#pragma unroll
      for (int e = 0; e < 8; ++e) before[e] += all[e];
    }
    add_total(all, totals, w, thread);
  }
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
#pragma unroll
    for (int e = 0; e < 8; ++e) g[i][e] += before[e];
  }
}
// Whether one anchor serves the whole tile; the same for all threads of the block, since every warp sees all channels.
__device__ __forceinline__ bool in_range(const float (&all)[8]) {
  bool good = true;
#pragma unroll
  for (int e = 0; e < 8; ++e) good &= all[e] >= -kRange;
  return __all_sync(0xffffffffu, good);
}

// q 2^G and k 2^-G in place, each warp its own rows. sums: G where an accumulator has its elements, times to_base_2 to
// base 2.
template <class Core>
__device__ __forceinline__ void gate_by_sums(std::uint32_t q_tile, std::uint32_t k_tile, const Accumulator& sums,
                                             float to_base_2, int thread) {
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    std::uint32_t x[4], y[4];
    TensorCore80::load_a<Stored::k_inner>(x, q_tile, k16, thread);
    TensorCore80::load_a<Stored::k_inner>(y, k_tile, k16, thread);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float first = sums[8 * k16 + 2 * i] * to_base_2, second = sums[8 * k16 + 2 * i + 1] * to_base_2;
      const float2 query = ptx::unpack_bf16(x[i]), key = ptx::unpack_bf16(y[i]);
      x[i] = ptx::pack_bf16(query.x * ptx::exp2(first), query.y * ptx::exp2(second));
      y[i] = ptx::pack_bf16(key.x * ptx::exp2(-first), key.y * ptx::exp2(-second));
    }
    Core::put_fragment(q_tile, x, k16, thread);
    Core::put_fragment(k_tile, y, k16, thread);
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
