// A chunk's gates in the one-pass forward (fused.cuh): q~ and k~, or v~, in place of what was loaded, with one anchor a
// chunk, and the decay of the state.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/forward/fused_anchors.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// ---- key gates ----

// The decay of the chunk for the two rows of the state that this thread holds, from a tile of natural-log gates.
__device__ __forceinline__ float2 decay_of_rows(std::uint32_t g_tile, int thread) {
  const float2 totals = sum_rows_of_tile(g_tile, thread);
  return make_float2(ptx::exp2(totals.x * kLog2E), ptx::exp2(totals.y * kLog2E));
}

// q 2^G and k 2^-G in place, from a tile of natural-log gates; and the decay as above. False where the warp's 16
// channels say that one anchor does not reach: then q and k are lost.
template <class Core>
__device__ __forceinline__ bool gate_by_channel(std::uint32_t q, std::uint32_t k, std::uint32_t g_tile, float2& decay,
                                                int thread) {
  std::uint32_t operand[16];
  triangle_of_ones<Triangle::lower>(operand, thread);
  Accumulator sums;
  Core::begin(operand);
  Core::template product<Stored::k_outer, true>(sums, operand, g_tile, thread_shuffled<Core>(thread));
  Core::commit();
  const float2 totals = sum_rows_of_tile(g_tile, thread);
  const float low = totals.x * kLog2E, high = totals.y * kLog2E;
  decay = make_float2(ptx::exp2(low), ptx::exp2(high));
  Core::template wait<0>(sums);
  gate_by_sums<Core>(q, k, sums, kLog2E, thread);
  return low >= -kRange && high >= -kRange;
}

// ---- one gate a token ----

// Running sums of a chunk's gates, base 2, where this thread needs them.
struct TokenSums {
  float moved[kRowsEach];  // at the rows of tiles it moves, of the head that it moves them for
  float2 own;              // at its accumulators' two rows
  float moved_total, total;
};

// All the same of a head; rows beyond the sequence's end have none. moved_gate: of the head whose rows first_row.. this
// thread moves.
__device__ __forceinline__ TokenSums constant_sums(float gate, float moved_gate, int first_row, int rows, int thread) {
  const auto passed = [&](int row) { return static_cast<float>(min(row + 1, rows)); };
  const int own = thread / 32 * 16 + thread % 32 / 4;
  TokenSums sums;
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) sums.moved[i] = moved_gate * passed(first_row + i);
  sums.own = make_float2(gate * passed(own), gate * passed(own + 8));
  sums.total = gate * passed(kChunk - 1);
  sums.moved_total = moved_gate * passed(kChunk - 1);
  return sums;
}
// gates: of tokens 2 lane and 2 lane + 1.
__device__ __forceinline__ TokenSums scan_tokens(const float (&gates)[2], int, int thread) {
  const int lane = thread % 32, warp = thread / 32;
  const float high = sum_so_far(gates[0] + gates[1], lane), low = high - gates[1];
  const auto at = [&](float x, int lane_with) { return __shfl_sync(0xffffffffu, x, lane_with); };
  TokenSums sums;
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) sums.moved[i] = at(i & 1 ? high : low, 8 * warp + 2 * (lane / 8) + i / 2);
  const float even[2] = {at(low, 8 * warp + lane / 8), at(low, 8 * warp + lane / 8 + 4)};
  const float odd[2] = {at(high, 8 * warp + lane / 8), at(high, 8 * warp + lane / 8 + 4)};
  sums.own = lane & 4 ? make_float2(odd[0], odd[1]) : make_float2(even[0], even[1]);
  sums.total = sums.moved_total = at(high, 31);
  return sums;
}
// gates: of tokens 4 (lane % 16) + {0..3} of head lane / 16 of the block's two.
__device__ __forceinline__ TokenSums scan_tokens(const float (&gates)[4], int group, int thread) {
  const int lane = thread % 32, warp = thread / 32;
  float sum[4] = {gates[0]};
#pragma unroll
  for (int i = 1; i < 4; ++i) sum[i] = sum[i - 1] + gates[i];
  float last = sum[3];
#pragma unroll
  for (int step = 1; step < 16; step *= 2) {
    const float other = __shfl_up_sync(0xffffffffu, last, step, 16);
    last += lane % 16 >= step ? other : 0.0f;
  }
  const float before = last - sum[3];
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[i] += before;
  const auto at = [&](float x, int lane_with) { return __shfl_sync(0xffffffffu, x, lane_with); };
  const int moved_head = lane & 8 ? 16 : 0;
  TokenSums sums;
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) sums.moved[i] = at(sum[i], moved_head + 4 * warp + 2 * group + lane / 16);
  float of_row = 0.0f;  // lane % 16 of the warp's 16
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float x = at(sum[i], 16 * group + 4 * warp + lane % 16 / 4);
    if (lane % 4 == i) of_row = x;
  }
  sums.own = make_float2(at(of_row, lane / 4), at(of_row, lane / 4 + 8));
  sums.total = at(last, 16 * group + 15);
  sums.moved_total = at(last, moved_head + 15);
  return sums;
}

__device__ __forceinline__ void scale_piece(std::uint32_t at, float factor) {
  float x[8];
  unpack_8(load_shared_16(at), x);
#pragma unroll
  for (int e = 0; e < 8; ++e) x[e] *= factor;
  store_shared_16(at, pack_8(x));
}

// A chunk beyond one anchor's reach: scores pair by pair from sums in double, whose differences are good for any gates;
// q 2^G and k 2^(sum of later gates) in place.
static __device__ __forceinline__ void gate_steep_tokens(Local<std::uint32_t, 16>& scores, std::uint32_t q,
                                                         std::uint32_t k, float2 gates, int thread) {
  const int lane = thread % 32, warp = thread / 32;
  sync_group();
  Local<float, 32> products;
  {
    Accumulator s;
    clear(s);
    TensorCore80::product<Stored::k_inner, Stored::k_inner, false, Loads::in_turn>(s, q, k, thread);
    products.put(s);
  }
  sync_group();
  const double own = gates.y, high = sum_so_far(static_cast<double>(gates.x) + own, lane);  // up to token 2 lane + 1
  const double low = high - own, last = __shfl_sync(0xffffffffu, high, 31);
  const auto row_sum = [&](int lane_with) {
    const double x = __shfl_sync(0xffffffffu, low, lane_with), y = __shfl_sync(0xffffffffu, high, lane_with);
    return lane & 4 ? y : x;
  };
  {
    const double sums[2] = {row_sum(8 * warp + lane / 8), row_sum(8 * warp + lane / 8 + 4)};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const double x[2] = {__shfl_sync(0xffffffffu, low, 4 * j + lane % 4),
                           __shfl_sync(0xffffffffu, high, 4 * j + lane % 4)};
      const int column = column_of_element(thread, 4 * j);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_of_element(thread, 2 * half);
        float pair[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float decay = ptx::exp2(fminf(static_cast<float>(sums[half] - x[e]), 0.0f));
          pair[e] = column + e <= row ? products.x[4 * j + 2 * half + e] * decay : 0.0f;
        }
        scores.x[2 * j + half] = ptx::pack_bf16(pair[0], pair[1]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const double sum = __shfl_sync(0xffffffffu, i & 1 ? high : low, 8 * warp + 2 * (lane / 8) + i / 2);
    scale_piece(q + own_piece(thread, i), ptx::exp2(static_cast<float>(sum)));
    scale_piece(k + own_piece(thread, i), ptx::exp2(static_cast<float>(last - sum)));
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
