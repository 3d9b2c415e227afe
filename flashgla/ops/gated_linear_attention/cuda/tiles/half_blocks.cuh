// The rung below anchors.cuh, on wgmma: as there, but half a block, 8 tokens, is half a k-step with an anchor of its
// own, the gates' sum after its fourth token, and log gates below kLeastGate are held there. So no token is more than
// 62 bits from its anchor and no anchor more than 124 from the next, for any gates. What that costs, and which results
// are given back what was held: README.md, "Half blocks".
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/tiles/anchors.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

constexpr int kHalfBlocks = 2 * kBlocks;
constexpr float kLeastGate = -10.75f;  // natural logarithm, a bf16 number

// Two gates, held at the least; and what they are below it, NaN where they are.
__device__ __forceinline__ std::uint32_t held_gates(std::uint32_t x) {
  return as_word(__hmax2_nan(as_pair(x), as_pair(0xc12cc12c)));
}
__device__ __forceinline__ std::uint32_t gates_below(std::uint32_t x) {
  return as_word(__hmin2_nan(__hadd2(as_pair(x), as_pair(0x412c412c)), as_pair(0)));
}
// What holding a gate back has multiplied by too much.
__device__ __forceinline__ float of_held(float gate) { return ptx::exp2(fminf(gate - kLeastGate, 0.0f) * kLog2E); }

// dg's sums, elements 8 t .. of an accumulator, times what the gates of a tile have been held back by.
__device__ __forceinline__ void times_held(float (&sums)[8], std::uint32_t g_tile, int t, int thread) {
  std::uint32_t x[4];
  TensorCore80::load_a<Stored::k_inner>(x, g_tile, t, thread);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 gates = ptx::unpack_bf16(x[i]);
    sums[2 * i] *= of_held(gates.x);
    sums[2 * i + 1] *= of_held(gates.y);
  }
}

// Factors as Anchors has them, between the anchors of half blocks: visit(t, factor t of this thread's rows), t up to
// kHalfBlocks. Returns the factor of what gates are below the least, over the chunk, kFirst: the first token's too.
template <bool kFirst, class Visit>
__device__ __forceinline__ float2 find_half_block_factors(std::uint32_t g_tile, int thread, Visit visit) {
  constexpr std::uint32_t ones = 0x3f803f80;
  // Columns of the product: sums over the first or the last 4 tokens of 8.
  const std::uint32_t b = thread / 4 % 2 == thread % 4 / 2 ? ones : 0;
  const auto factors_of = [](float low, float high) {
    return make_float2(ptx::exp2(low * kLog2E), ptx::exp2(high * kLog2E));
  };
  float2 after = make_float2(0.0f, 0.0f);
  float below[4] = {};
#pragma unroll
  for (int t = 0; t < kBlocks; ++t) {
    std::uint32_t a[4], less[4];
    TensorCore80::load_a<Stored::k_outer>(a, g_tile, t, thread);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      less[i] = gates_below(a[i]);
      a[i] = held_gates(a[i]);
    }
    if (!kFirst && t == 0 && thread % 4 == 0) {
      less[0] &= 0xffff0000;
      less[1] &= 0xffff0000;
    }
    float early[4] = {}, late[4] = {};
    TensorCore80::multiply(early, a, b, 0);
    TensorCore80::multiply(late, a, 0, b);
    TensorCore80::multiply(below, less, ones, ones);
    visit(2 * t, factors_of(after.x + early[0], after.y + early[2]));
    visit(2 * t + 1, factors_of(early[1] + late[0], early[3] + late[2]));
    after = make_float2(late[1], late[3]);
  }
  visit(kHalfBlocks, factors_of(after.x, after.y));
  return factors_of(below[0], below[2]);
}

// Natural logarithms of what 16 channels of the warp's rows fall by from their half block's anchor, where an
// accumulator has its elements 8 k16 ..: ones after the anchor and minus ones before it, times the rows of a tile of
// gates.
struct HalfBlockSums {
  std::uint32_t operand, g_tile;
  __device__ __forceinline__ HalfBlockSums(std::uint32_t tile, int thread) : operand(0), g_tile(tile) {
    const int row = thread % 32 / 4;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = 2 * (thread % 4) + e;
      const std::uint32_t one = column > 3 ? (column <= row ? 0x3f80u : 0u) : (row < column ? 0xbf80u : 0u);
      operand |= one << 16 * e;
    }
  }
  __device__ __forceinline__ void find(float (&sums)[8], int k16, int thread) const {
    const std::uint32_t a[4] = {operand, 0, 0, operand};
    std::uint32_t b[4];
    TensorCore80::load_b<Stored::k_outer>(b, g_tile, thread / 32, 2 * k16, thread);
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i] = held_gates(b[i]);
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] = 0.0f;
    TensorCore80::multiply(sums, a, b[0], b[1]);
    TensorCore80::multiply(sums + 4, a, b[2], b[3]);
  }
};

// The rung that the chunk's factors, of each channel but the last one, would have had, for the chunk beside it;
// factor(t): of two channels of this lane's. None where a gate was NaN.
struct NextRung {
  Rung rung;
  bool is_nan;
};
template <class Factor>
__device__ __forceinline__ NextRung rung_of_half_blocks(float bits, Factor factor) {
  constexpr float kNear = 1.0f / (1ull << 60) / (1 << 16);  // 2^-76
  float2 all = make_float2(1.0f, 1.0f);
  float least = 1.0f;
#pragma unroll
  for (int t = 0; t < kHalfBlocks; ++t) {
    const float2 more = factor(t);
    all = make_float2(all.x * more.x, all.y * more.y);
    least = fminf(least, fminf(more.x, more.y));
  }
  const float reach = ptx::exp2(-bits);
  const bool one = __all_sync(0xffffffffu, all.x >= reach && all.y >= reach) != 0,
             near = __all_sync(0xffffffffu, least >= kNear) != 0;
  const float sum = all.x + all.y;
  return {one ? Rung::one_anchor : near ? Rung::anchors : Rung::half_blocks, __any_sync(0xffffffffu, sum != sum) != 0};
}

// What tokens have with themselves leaves the pairs of the warp's rows, either way up, for a vector of 64 floats.
__device__ __forceinline__ void take_diagonal(std::uint32_t vector, std::uint32_t (&pairs)[16], int thread) {
  const int row = thread % 32 / 4, column = 2 * (thread % 4);
  const std::uint32_t mask = (row == column ? 0xffffu : 0u) | (row == column + 1 ? 0xffff0000u : 0u);
  std::uint32_t first = 0, second = 0;
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    const std::uint32_t own = k16 == thread / 32 ? mask : 0u;
    first |= pairs[4 * k16] & own;
    second |= pairs[4 * k16 + 3] & own;
    pairs[4 * k16] &= ~own;
    pairs[4 * k16 + 3] &= ~own;
  }
  const auto value = [](std::uint32_t x) {  // one of the two is 0
    const float2 pair = ptx::unpack_bf16(x);
    return __float_as_uint(pair.x + pair.y);
  };
  if (mask == 0) return;
  const std::uint32_t at = vector + 4 * (thread / 32 * 16 + row);
  store_shared_4(at, value(first));
  store_shared_4(at + 32, value(second));
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
