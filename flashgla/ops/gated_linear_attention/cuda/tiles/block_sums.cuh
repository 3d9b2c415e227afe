// Gates of a chunk's four blocks of 16 tokens, each the rows of one warp, in sums: of a warp's own block in its
// registers, and what blocks tell each other by shared memory. What the ladder (ladder.cuh) multiplies by.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/tiles/tile.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

constexpr int kBlockTokens = 16, kBlocks = kTile / kBlockTokens;
// Bits either side of a block's anchor: 2^80 k is far from overflow for any activation, 2^-80 k from underflow.
constexpr float kBlockReach = 80.0f;
constexpr float kStrongest = -150.0f;  // base-2 gates below are 0 in f32 anyway; keeps sums finite when g = -inf

// ---- running sums of a block's gates, base 2, where the warp's accumulators have its elements ----

// In place, from the gates themselves. NaN flows to later tokens alone.
__device__ __forceinline__ void scan_block(Accumulator& sums, int lane) {
#pragma unroll
  for (int distance = 4; distance < 32; distance *= 2) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const float before = __shfl_up_sync(0xffffffffu, sums[i], distance);
      if (lane >= distance) sums[i] += before;
    }
  }
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    if (i & 2) sums[i] += __shfl_sync(0xffffffffu, sums[i ^ 2], 28 + (lane & 3));
  }
}

// From gates of f32 or one a token: gate(row, column) gives those of a column and the next, base 2.
template <class Gate>
__device__ __forceinline__ void sum_block_of(Accumulator& sums, int thread, Gate gate) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float2 g = gate(row_of_element(thread, 2 * i), column_of_element(thread, 2 * i));
    sums[2 * i] = ptx::larger_or_nan(g.x, kStrongest);
    sums[2 * i + 1] = ptx::larger_or_nan(g.y, kStrongest);
  }
  scan_block(sums, thread & 31);
}

// Of one gate a token, 64 floats: their running sums over the chunk at this thread's two rows of an accumulator.
__device__ __forceinline__ float2 token_sums(std::uint32_t gates, int thread) {
  const int lane = thread % 32, row = row_of_element(thread, 0);
  const float odd = float_at(gates, 2 * lane + 1), high = sum_so_far(float_at(gates, 2 * lane) + odd, lane),
              low = high - odd;
  const auto at_row = [&](int r) {
    const float x = __shfl_sync(0xffffffffu, low, r / 2), y = __shfl_sync(0xffffffffu, high, r / 2);
    return r % 2 != 0 ? y : x;
  };
  return make_float2(at_row(row), at_row(row + 8));
}

// From a tile of bf16, natural logarithms: a triangle of ones times the warp's 16 rows.
__device__ __forceinline__ void sum_block(Accumulator& sums, std::uint32_t g_tile, int thread) {
  constexpr std::uint32_t ones = 0x3f803f80, low_one = 0x00003f80;
  const int warp = thread / 32, row = thread % 32 / 4, column = 2 * (thread % 4);
  const std::uint32_t lower = column < row ? ones : column == row ? low_one : 0;
  const std::uint32_t triangle[4] = {lower, ones, 0, lower};
  const auto clamped = [](std::uint32_t x) { return as_word(__hmax2_nan(as_pair(x), as_pair(0xc2d0c2d0))); };  // -104
  clear(sums);
  float test = 0.0f;
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    std::uint32_t b[4];
    TensorCore80::load_b<Stored::k_outer>(b, g_tile, warp, j, thread);
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i] = clamped(b[i]);
    TensorCore80::multiply(sums + 4 * j, triangle, b[0], b[1]);
    TensorCore80::multiply(sums + 4 * j + 4, triangle, b[2], b[3]);
#pragma unroll
    for (int i = 0; i < 8; ++i) test += sums[4 * j + i];
  }
  if (__any_sync(0xffffffffu, test != test)) {  // 0 times NaN has reached earlier tokens: NaN counted apart
#pragma unroll 1
    for (int j = 0; j < 8; j += 2) {
      std::uint32_t b[4], is_nan[4];
      TensorCore80::load_b<Stored::k_outer>(b, g_tile, warp, j, thread);
      float count[8] = {}, sum[8] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::uint32_t low = (b[i] & 0x7fffu) > 0x7f80u ? 0xffffu : 0u,
                            high = (b[i] >> 16 & 0x7fffu) > 0x7f80u ? 0xffff0000u : 0u;
        is_nan[i] = ones & (low | high);
        b[i] = clamped(b[i] & ~(low | high));
      }
      TensorCore80::multiply(sum, triangle, b[0], b[1]);
      TensorCore80::multiply(sum + 4, triangle, b[2], b[3]);
      TensorCore80::multiply(count, triangle, is_nan[0], is_nan[1]);
      TensorCore80::multiply(count + 4, triangle, is_nan[2], is_nan[3]);
#pragma unroll
      for (int at = 0; at < 8; at += 2) {
        if (at != j) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[4 * at + i] = count[i] > 0.0f ? __uint_as_float(0x7fffffffu) : sum[i];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 32; ++i) sums[i] *= kLog2E;
}

// ---- what blocks tell each other ----
// A warp's 2 KiB of a room of 8 KiB, 64 floats each: the sums over the block's first half (1 where it is not near, as
// no sum is) and over all of it, and six vectors of factors of its own.

constexpr int kBlockRoom = 2048;
__device__ __forceinline__ std::uint32_t block_half(std::uint32_t room, int block) { return room + kBlockRoom * block; }
__device__ __forceinline__ std::uint32_t block_total(std::uint32_t room, int block) {
  return room + kBlockRoom * block + 256;
}
__device__ __forceinline__ std::uint32_t block_factor(std::uint32_t room, int block, int which) {
  return room + kBlockRoom * block + 512 + 256 * which;
}

// Whether the warp's block is near.
__device__ __forceinline__ bool is_near(const Accumulator& sums, int lane) {
  bool near = true;
  if (lane >= 28) {  // they have tokens 7 and 15
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      near = near && sums[4 * j] >= -kBlockReach && sums[4 * j + 1] >= -kBlockReach &&
             sums[4 * j + 2] - sums[4 * j] >= -kBlockReach && sums[4 * j + 3] - sums[4 * j + 1] >= -kBlockReach;
    }
  }
  return __all_sync(0xffffffffu, near) != 0;
}
// Before the group's barrier.
__device__ __forceinline__ void publish_block(std::uint32_t room, const Accumulator& sums, bool near, int thread) {
  const int warp = thread / 32, lane = thread % 32;
  if (lane >= 28) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int at = 4 * (8 * j + 2 * (lane % 4));
      store_shared_float2(block_half(room, warp) + at,
                          near ? make_float2(sums[4 * j], sums[4 * j + 1]) : make_float2(1.0f, 1.0f));
      store_shared_float2(block_total(room, warp) + at, make_float2(sums[4 * j + 2], sums[4 * j + 3]));
    }
  }
}

// After it: of the lane's two channels, 2 lane and the next. Sums of gates: of all of a block, from its start to the
// keys' anchor and from there to its end, and from its start to the queries'.
struct BlockSums {
  float2 total[kBlocks], to_keys[kBlocks], after_keys[kBlocks], to_queries[kBlocks];
};
__device__ __forceinline__ float2 sum_of(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }
__device__ __forceinline__ float2 half_of(float2 x) { return make_float2(0.5f * x.x, 0.5f * x.y); }
__device__ __forceinline__ float2 power_of(float2 x) { return make_float2(ptx::exp2(x.x), ptx::exp2(x.y)); }
__device__ __forceinline__ BlockSums read_blocks(std::uint32_t room, int lane) {
  BlockSums sums;
  const float2 none = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int t = 0; t < kBlocks; ++t) {
    __syncwarp();  // or ptxas loads ahead what it has no registers for
    const float2 half = load_shared_float2(block_half(room, t) + 8 * lane),
                 total = load_shared_float2(block_total(room, t) + 8 * lane);
    const bool near = half.x <= 0.0f;
    const float2 rest = make_float2(total.x - half.x, total.y - half.y);
    sums.total[t] = total;
    sums.to_keys[t] = near ? half : total;
    sums.after_keys[t] = near ? rest : none;
    sums.to_queries[t] = near ? half : none;
  }
  return sums;
}
// Whether one, or each of them, is near.
__device__ __forceinline__ bool block_is_near(std::uint32_t room, int block) {
  return float_at(block_half(room, block)) <= 0.0f;
}
__device__ __forceinline__ bool each_is_near(std::uint32_t room) {
  bool near = true;
#pragma unroll
  for (int t = 0; t < kBlocks; ++t) near = near && block_is_near(room, t);
  return near;
}
// The sums over the whole chunk.
__device__ __forceinline__ float2 sum_of_blocks(const BlockSums& sums) {
  return sum_of(sum_of(sums.total[0], sums.total[1]), sum_of(sums.total[2], sums.total[3]));
}
// Factors of the queries of block w: 0 from block 0's keys' anchor (from w = 0's own queries') to the chunk's start; t
// from block t's keys' anchor (w: the queries') to block t - 1's keys'. Of w the root.
__device__ __forceinline__ void put_block_factors(std::uint32_t room, const BlockSums& sums, int warp, int lane) {
#pragma unroll
  for (int t = 0; t < kBlocks; ++t) {
    float2 exponent = t == warp ? sums.to_queries[t] : sums.to_keys[t];
    if (t > 0) exponent = sum_of(exponent, sums.after_keys[t - 1]);
    if (t == warp) exponent = half_of(exponent);
    store_shared_float2(block_factor(room, warp, t) + 8 * lane, power_of(exponent));
  }
}
// From the keys' anchor of block w to the chunk's end.
__device__ __forceinline__ float2 factor_to_end(const BlockSums& sums, int warp) {
  float2 exponent = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int t = 0; t < kBlocks; ++t) {
    if (t == warp) exponent = sum_of(exponent, sums.after_keys[t]);
    if (t > warp) exponent = sum_of(exponent, sums.total[t]);
  }
  return power_of(exponent);
}
// Of this thread's elements 8 k16 + 2 i and the next: what a vector of 64 floats has for their columns.
__device__ __forceinline__ float2 of_columns(std::uint32_t vector, int k16, int i, int thread) {
  return load_shared_float2(vector + 4 * (16 * k16 + 8 * (i >> 1) + 2 * (thread & 3)));
}
// at: of the vector's element of this thread's first column.
__device__ __forceinline__ void scale_columns_at(Accumulator& a, std::uint32_t at) {
  scale_columns(a, [&](int j) { return load_shared_float2(at + 32 * j); });
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
