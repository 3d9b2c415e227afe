// What the three kernels of this folder have in common: sums of a chunk's gates, and accumulators on their way to rows.
#pragma once

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/tiles/pieces.cuh"

namespace flashgla::ops::gated_linear_attention::cuda::shared_keys {

constexpr unsigned kWarp = 0xffffffffu;

// A gate below is as good as a reset, and sums over a chunk of what is left are exact to 2^-10.
constexpr float kLeastGate = -150.0f;

// Where a chunk lies, in 32 bits, for it is held through a loop.
struct ChunkPlace {
  int batch, token, rows;  // its first token within the batch element; its tokens
  __device__ __forceinline__ ChunkPlace(const Span& span, std::int64_t first)
      : batch(static_cast<int>(span.batch)),
        token(static_cast<int>(span.begin + first)),
        rows(static_cast<int>(span.length - first < kChunk ? span.length - first : kChunk)) {}

  // Elements before channel 0 of a row of the chunk.
  __device__ __forceinline__ std::int64_t offset(const Strided& s, int row, int head) const {
    return batch * s.batch + (token + row) * s.token + head * s.head;
  }
};
// 64 channels of a tensor of bf16.
__device__ __forceinline__ Rows rows_of(const Strided& s, const ChunkPlace& at, int head, int channel = 0) {
  return {static_cast<const char*>(s.data) + 2 * (at.offset(s, 0, head) + channel), static_cast<int>(2 * s.token),
          at.rows, kTile};
}
// Rows of a warp's accumulator to those of a tensor.
__device__ __forceinline__ void store_row_piece(const Rows& to, int row, int piece, uint4 x) {
  if (row < to.rows) {
    store_global_16(const_cast<char*>(to.data) + static_cast<std::int64_t>(row) * to.stride + 16 * piece, x);
  }
}

// A token's gate in base 2.
__device__ __forceinline__ float gate_at(const Params& p, std::int64_t offset) {
  return ptx::larger_or_nan(load_as(p.gate_dtype, p.g.data, offset) * kLog2E, kLeastGate);
}
// Of a chunk's tokens 2 lane and the next; 0 beyond the sequence.
__device__ __forceinline__ float2 load_gates(const Params& p, const ChunkPlace& chunk, int head) {
  const int row = 2 * (threadIdx.x & 31);
  const std::int64_t at = chunk.offset(p.g, row, head);
  return make_float2(row < chunk.rows ? gate_at(p, at) : 0.0f,
                     row + 1 < chunk.rows ? gate_at(p, at + p.g.token) : 0.0f);
}

// Sums of a chunk's gates through tokens 2 lane and 2 lane + 1, and of all.
struct GateSums {
  float first, second, total;
};
__device__ __forceinline__ float sum_of_lanes_before(float x, int lane) {
  const float before = __shfl_up_sync(kWarp, sum_so_far(x, lane), 1);
  return lane == 0 ? 0.0f : before;
}
__device__ __forceinline__ float sum_of_lanes_behind(float x, int lane) {
  const float behind = __shfl_down_sync(kWarp, sum_to_come(x, lane), 1);
  return lane == 31 ? 0.0f : behind;
}
__device__ __forceinline__ GateSums sum_gates(float2 g, int lane) {
  GateSums sums;
  sums.first = sum_of_lanes_before(g.x + g.y, lane) + g.x;
  sums.second = sums.first + g.y;
  sums.total = __shfl_sync(kWarp, sums.second, 31);
  return sums;
}

// Of four words a lane, word i of lane l of a quad becomes word l of lane i.
__device__ __forceinline__ void transpose_quad(std::uint32_t (&w)[4], int lane) {
  const auto exchange = [&](std::uint32_t& low, std::uint32_t& high, int distance) {
    const bool upper = lane & distance;
    const std::uint32_t got = __shfl_xor_sync(kWarp, upper ? low : high, distance);
    (upper ? low : high) = got;
  };
  exchange(w[0], w[1], 1);
  exchange(w[2], w[3], 1);
  exchange(w[0], w[2], 2);
  exchange(w[1], w[3], 2);
}

// Four 8-column blocks of a warp's accumulator, rounded, in pieces of 16 bytes: store(row of the warp's 16, which of
// the four, piece).
template <class Store>
__device__ __forceinline__ void store_pieces(const float (&a)[16], int lane, const Store& store) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    std::uint32_t w[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) w[j] = ptx::pack_bf16(a[4 * j + 2 * half], a[4 * j + 2 * half + 1]);
    transpose_quad(w, lane);
    store(lane / 4 + 8 * half, lane & 3, make_uint4(w[0], w[1], w[2], w[3]));
  }
}
template <class Store>
__device__ __forceinline__ void store_pieces(const Accumulator& a, int lane, const Store& store) {
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    float part[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) part[i] = a[16 * group + i];
    store_pieces(part, lane, [&](int row, int piece, uint4 x) { store(row, 4 * group + piece, x); });
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda::shared_keys
