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
  const float2 sums = dot_rows(a, two_of_operand(x));
  const int row = row_of_element(thread, 0);
  return weight(row) * sums.x + weight(row + 8) * sums.y;
}

// Half of the dot product of row thread / 2 of two tiles.
__device__ __forceinline__ float dot_of_rows(const char* a, const char* b, int thread) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t at = tile_piece(thread >> 1, i + 4 * (thread & 1));
    float x[8], y[8];
    unpack_8(*reinterpret_cast<const uint4*>(a + at), x);
    unpack_8(*reinterpret_cast<const uint4*>(b + at), y);
#pragma unroll
    for (int e = 0; e < 8; e += 2) sum += x[e] * y[e] + x[e + 1] * y[e + 1];
  }
  return sum;
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
