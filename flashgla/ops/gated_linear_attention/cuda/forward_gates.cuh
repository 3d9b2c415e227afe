// Gates of a 64x64 tile (64 tokens, 64 key channels), and the stability ladder of the scores
//     P_ij = sum_k q_ik k_jk 2^(G_ik - G_jk), i >= j,   G the running sum of the gates, base 2, over the chunk.
//
// 1. One anchor, the chunk's start, while no channel falls by more than kRange bits: q 2^G times k 2^-G, a plain
//    product. Entries above the diagonal may be as large as 2^kRange; they are selected away.
// 2. Else by sub-chunks of 16 tokens. Off the diagonal with the start of the query's sub-chunk as anchor: both
//    exponents are sums of gates, never positive, and never a difference of sums.
// 3. On the diagonal as in 1 where the sub-chunk is in range, and else element by element, each exponent the sum of
//    its own gates.
// 1 is decided for a chunk and 64 channels, 3 for 16 tokens and 64 channels, from the data.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/forward_tiles.cuh"

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
// The sum over the warps after this thread's.
__device__ __forceinline__ void sum_later_warps(float (&after)[8], std::uint32_t totals, int thread) {
#pragma unroll
  for (int e = 0; e < 8; ++e) after[e] = 0.0f;
  for (int w = thread / 32 + 1; w < kGroupThreads / 32; ++w) add_total(after, totals, w, thread);
}

// Whether one anchor serves the whole tile; the same for all threads of the block, since every warp sees all channels.
__device__ __forceinline__ bool in_range(const float (&all)[8]) {
  bool good = true;
#pragma unroll
  for (int e = 0; e < 8; ++e) good &= all[e] >= -kRange;
  return __all_sync(0xffffffffu, good);
}

// From gates as loaded to the sum over all later tokens of the chunk, for each of this thread's tokens.
__device__ __forceinline__ void suffix_gates(Gates& g, const float (&after)[8], int thread) {
  const int lane = thread % 32;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    float own = 0.0f;
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) own += g[i][e];
    float sum = own;
    float other = __shfl_down_sync(0xffffffffu, sum, 8);
    sum += lane < 24 ? other : 0.0f;
    other = __shfl_down_sync(0xffffffffu, sum, 16);
    sum += lane < 16 ? other : 0.0f;
    other = __shfl_down_sync(0xffffffffu, sum, 8);
    float later = after[e] + (lane < 24 ? other : 0.0f);
#pragma unroll
    for (int i = kRowsEach - 1; i >= 0; --i) {
      const float mine = g[i][e];
      g[i][e] = later;
      later += mine;
    }
  }
}

// The decay of the whole chunk for the two rows of a state that this thread holds: key channels of its warp's rows
// lane / 4 and lane / 4 + 8, found at the threads that scanned them.
__device__ __forceinline__ float2 row_decays(const float (&all)[8], int thread) {
  const int lane = thread % 32, warp = thread / 32;
  float2 sums = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const float x = __shfl_sync(0xffffffffu, all[e], 2 * warp), y = __shfl_sync(0xffffffffu, all[e], 2 * warp + 1);
    if (lane / 4 == e) sums = make_float2(x, y);
  }
  return make_float2(ptx::exp2(sums.x), ptx::exp2(sums.y));
}

// Pair of bf16 elements (row, channel) and (row, channel + 1) of a tile; channel even.
__device__ __forceinline__ float2 tile_pair(std::uint32_t tile, int row, int channel) {
  return ptx::unpack_bf16(load_shared_4(tile + tile_piece(row, channel / 8) + (channel % 8) * 2));
}

// Rungs 2 and 3 for the rows of one warp: s += scores over the tile's 64 channels, from q and k as loaded.
// gate(token, channel): base-2 gates of channel and channel + 1.
template <class Gate>
__device__ __forceinline__ void add_scores_by_sub_chunks(Accumulator& s, std::uint32_t q_tile, std::uint32_t k_tile,
                                                         Gate gate, int thread) {
  const int warp = thread / 32, lane = thread % 32;
  float2 total = make_float2(0.0f, 0.0f);
  for (int t = 0; t < 16; ++t) {
    const float2 g = gate(16 * warp + t, 2 * lane);
    total.x += g.x;
    total.y += g.y;
  }
  const bool exact = !__all_sync(0xffffffffu, total.x >= -kRange && total.y >= -kRange);
  const int row = lane / 4;

#pragma unroll 1
  for (int step = 0; step < 4; ++step) {
    std::uint32_t a[4];
    float2 prefix[2][2];  // [row, row + 8][channels c, c + 8]: gates from the sub-chunk's start to the row, inclusive
    const int channel = 16 * step + 2 * (lane % 4);
    {
      float2 run[2] = {make_float2(0.0f, 0.0f), make_float2(0.0f, 0.0f)};
      for (int t = 0; t < 16; ++t) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float2 g = gate(16 * warp + t, channel + 8 * c);
          run[c].x += g.x;
          run[c].y += g.y;
          if (t == row) prefix[0][c] = run[c];
          if (t == row + 8) prefix[1][c] = run[c];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // a[0]: row, c; a[1]: row + 8, c; a[2]: row, c + 8; a[3]: row + 8, c + 8
      const float2 q = tile_pair(q_tile, 16 * warp + row + 8 * (i % 2), channel + 8 * (i / 2));
      const float2 exponent = prefix[i % 2][i / 2];
      a[i] = ptx::pack_bf16(q.x * ptx::exp2(exponent.x), q.y * ptx::exp2(exponent.y));
    }
    float2 run[2] = {make_float2(0.0f, 0.0f), make_float2(0.0f, 0.0f)};
#pragma unroll
    for (int block = 3; block >= 0; --block) {
      if (block >= warp) continue;
      std::uint32_t b[4];  // b[0], b[1]: tokens 0..7 of the block, channels c, c + 8; b[2], b[3]: tokens 8..15
#pragma unroll
      for (int half = 1; half >= 0; --half) {
        float2 exponent[2];
        for (int t = 7; t >= 0; --t) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            if (t == row) exponent[c] = run[c];
            const float2 g = gate(16 * block + 8 * half + t, channel + 8 * c);
            run[c].x += g.x;
            run[c].y += g.y;
          }
        }
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float2 k = tile_pair(k_tile, 16 * block + 8 * half + row, channel + 8 * c);
          b[2 * half + c] = ptx::pack_bf16(k.x * ptx::exp2(exponent[c].x), k.y * ptx::exp2(exponent[c].y));
        }
      }
      TensorCore80::multiply(s + 8 * block, a, b[0], b[1]);
      TensorCore80::multiply(s + 8 * block + 4, a, b[2], b[3]);
    }
    if (!exact) {
      std::uint32_t b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 k = tile_pair(k_tile, 16 * warp + row + 8 * (i / 2), channel + 8 * (i % 2));
        const float2 exponent = prefix[i / 2][i % 2];
        b[i] = ptx::pack_bf16(k.x * ptx::exp2(-exponent.x), k.y * ptx::exp2(-exponent.y));
      }
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        if (block != warp) continue;
        TensorCore80::multiply(s + 8 * block, a, b[0], b[1]);
        TensorCore80::multiply(s + 8 * block + 4, a, b[2], b[3]);
      }
    }
  }

  if (!exact) return;
  // Lane: column j = lane % 16 of the diagonal block, half of the channels; rows i in registers.
  const int j = lane % 16, half = lane / 16;
  float column[16] = {};
  for (int pair = 0; pair < 16; ++pair) {
    const int channel = 32 * half + 2 * pair;
    const float2 k = tile_pair(k_tile, 16 * warp + j, channel);
    float2 run = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 g = gate(16 * warp + i, channel);
      const float2 q = tile_pair(q_tile, 16 * warp + i, channel);
      if (i > j) {
        run.x += g.x;
        run.y += g.y;
      }
      if (i >= j) column[i] += q.x * k.x * ptx::exp2(run.x) + q.y * k.y * ptx::exp2(run.y);
    }
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    column[i] += __shfl_xor_sync(0xffffffffu, column[i], 16);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float x = __shfl_sync(0xffffffffu, column[i], 8 * n + 2 * (lane % 4) + e);
        if (i % 8 != row) continue;
#pragma unroll
        for (int block = 0; block < 4; ++block) {
          if (block == warp) s[4 * (2 * block + n) + 2 * (i / 8) + e] += x;
        }
      }
    }
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
