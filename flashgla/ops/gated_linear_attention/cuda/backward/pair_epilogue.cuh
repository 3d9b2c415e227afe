// What the epilogue of make_dq_dk_dg does with accumulators where they are, beside products.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/backward/gates.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/tiles/pieces.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// This thread's part of sum of weight(row) * tile[row][column] * a[row][column].
template <class Weight>
__device__ __forceinline__ float weighted_dot(const char* tile, const Accumulator& a, int thread, Weight weight) {
  std::uint32_t x[16];
  load_operand<Stored::k_inner>(x, ptx::shared_address(tile), thread);
  float sums[2] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float2 pair = ptx::unpack_bf16(x[i]);
    sums[i & 1] += pair.x * a[2 * i] + pair.y * a[2 * i + 1];
  }
  const int row = row_of_element(thread, 0);
  return weight(row) * sums[0] + weight(row + 8) * sums[1];
}

// Running sums of base-2 gates where an accumulator has its elements, from gates in memory of f32. parts: the group's,
// with barrier `barrier`.
__device__ __forceinline__ void sum_wide_gates(Accumulator& b, const float* rows, std::int64_t stride, int count,
                                               int channels, ColumnParts& parts, int barrier, int thread) {
  const int warp = thread >> 5, lane = thread & 31, row = row_of_element(thread, 0), column = 2 * (lane & 3);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int r = row + 8 * (i & 1), c = 8 * (i / 2) + column;
    float2 g = make_float2(0.0f, 0.0f);
    if (r < count && c < channels) g = *reinterpret_cast<const float2*>(rows + r * stride + c);
    b[2 * i] = ptx::larger_or_nan(g.x * kLog2E, kStrongest);
    b[2 * i + 1] = ptx::larger_or_nan(g.y * kLog2E, kStrongest);
  }
#pragma unroll
  for (int distance = 4; distance < 32; distance *= 2) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const float before = __shfl_up_sync(0xffffffffu, b[i], distance);
      if (lane >= distance) b[i] += before;
    }
  }
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    if (i & 2) b[i] += __shfl_sync(0xffffffffu, b[i ^ 2], 28 + (lane & 3));
  }
  if (lane >= 28) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      *reinterpret_cast<float2*>(&parts[warp][8 * j + column]) = make_float2(b[4 * j + 2], b[4 * j + 3]);
    }
  }
  ptx::barrier(barrier, kGroupThreads);
#pragma unroll
  for (int w = 0; w < 3; ++w) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {  // without branches, between which so many registers would have to agree
      float2 sum = *reinterpret_cast<const float2*>(&parts[w][8 * j + column]);
      sum = w < warp ? sum : make_float2(0.0f, 0.0f);
      b[4 * j] += sum.x;
      b[4 * j + 1] += sum.y;
      b[4 * j + 2] += sum.x;
      b[4 * j + 3] += sum.y;
    }
  }
}

// store_tile of rows that fit pieces, without branches: products may be under way, which the compiler would end first.
__device__ __forceinline__ void store_pieces(const Rows& r, std::uint32_t tile, int thread) {
  const int row = kRowsEach * (thread / 8), left = thread % 8 * 8 < r.channels ? r.rows - row : 0;
  const char* to = r.data + row * r.stride + thread % 8 * 16;
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const uint4 x = load_shared_16(tile + own_piece(thread, i));
    asm volatile(
        "{\n.reg .pred there;\nsetp.gt.s32 there, %5, %6;\n@there st.global.v4.b32 [%0], {%1,%2,%3,%4};\n}" ::"l"(
            to + i * r.stride),
        "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(left), "r"(i)
        : "memory");
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
