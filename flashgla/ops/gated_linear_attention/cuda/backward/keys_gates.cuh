// What make_dq_dk_dg (backward/keys.cuh) does for gates alone: their sums, tiles out of one anchor's reach, dg on its
// way out.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/backward/keys_view.cuh"

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

// Of a tile that falls by more than kSteep, by blocks: across and within from what reaches beyond the chunk to dq and
// dk, and scale q dq - k dk.
template <class View>
__device__ __forceinline__ void finish_steep_pair(const View& view, const PairPlace& at, int rows, Accumulator& across,
                                                  Accumulator& within, Local<float, 32>& steep_e, int thread) {
  using Core = typename View::Core;
  using Layout = typename View::Layout;
  constexpr GateTile kGate = View::kGate;
  const Params& p = view.p;
  const bool late = view.late;
  const int channel = at.key_tile * kTile, query_head = at.kv_head * p.group + at.in_group;
  const std::uint32_t own_q = view.own_tile(Layout::q), own_k = view.own_tile(Layout::k),
                      own_a = view.own_tile(Layout::a), own_gates = view.own_tile(Layout::gates);
  ColumnParts& by_keys = view.parts(view.part());
  std::uint32_t operand[16];
  load_operand<View::k_inner>(operand, own_a, thread);
  View::meet();
  if (!late) put_operand<Core, true>(own_a, operand, thread);  // [query][key]
  load_tile(own_q, view.rows_at(at, p.q, 2, query_head, channel, p.key_dim), thread);
  load_tile(own_k, view.rows_at(at, p.k, 2, at.kv_head, channel, p.key_dim), thread);
  ptx::copy_async_commit();
  if constexpr (kGate == GateTile::narrow) view.load_gates(at);  // another query head has had their place
  ptx::copy_async_wait<0>();
  if constexpr (kGate == GateTile::narrow) view.turn_gates(at);
  __syncwarp();  // a warp reads what it has loaded
  Accumulator dq, dk;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    dq[i] = late ? across[i] : within[i];
    dk[i] = late ? within[i] : across[i];
  }
  finish_by_blocks<Core>(
      dq, dk, steep_e, own_q, own_k, own_a, own_gates, p.scale,
      [&](Accumulator& sums, int thread) {
        if constexpr (kGate == GateTile::narrow) {
          sum_block(sums, own_gates, thread);
        } else if constexpr (kGate == GateTile::wide) {
          const Rows gates = view.rows_at(at, p.g, 4, at.kv_head, channel, p.key_dim);
          sum_block_of(sums, thread, [&](int row, int column) { return f32_gates_at(gates, row, column); });
        } else {
          const char* from = view.token_gates(at);
          sum_block_of(sums, thread, [&](int row, int) {
            const float g = row < rows ? load_as(p.gate_dtype, from, row * p.g.token) * kLog2E : 0.0f;
            return make_float2(g, g);
          });
        }
      },
      [&](const Accumulator& beyond_keys, float2 to_end) {
        const int thread = fresh_thread();
        sum_beyond(by_keys, view.shared + view.own(Layout::k), beyond_keys, thread);
        by_keys[thread / 32][2 * (thread % 32)] *= to_end.x;
        by_keys[thread / 32][2 * (thread % 32) + 1] *= to_end.y;
      });
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    dq[i] *= p.scale;
    across[i] = late ? dq[i] : dk[i];
    within[i] = late ? dk[i] : dq[i];
  }
}

// Running sums of gates of f32, where an accumulator has its elements: before a is put where what is left of the
// gates lies.
template <class View>
__device__ __forceinline__ void sum_wide_gates(const View& view, Accumulator& b, int thread) {
  using Core = typename View::Core;
  using Layout = typename View::Layout;
  std::uint32_t triangle[16];
  triangle_of_ones<Triangle::lower>(triangle, thread);
  Core::publish();
  View::meet_group();
  Core::begin(triangle);
  Core::template product<Stored::k_outer, true>(b, triangle, view.own_tile(Layout::gates), thread);
  Core::template product<Stored::k_outer>(b, triangle, view.own_tile(Layout::a), thread);
  Core::finish(b);
  View::meet_group();
}

// Running sums of gates of one a token, where an accumulator has its elements; of a steep tile none.
template <class View>
__device__ __forceinline__ void sum_token_gates(const View& view, Accumulator& b, float* row_sums, bool steep,
                                                int thread) {
  if (thread < kTile) {
    row_sums[thread] = ptx::larger_or_nan(view.floats(view.own(View::Layout::gates))[thread] * kLog2E, kStrongest);
  }
  View::meet_group();
  const float2 of_rows = token_sums(ptx::shared_address(row_sums), thread);
  const float low = steep ? 0.0f : of_rows.x, high = steep ? 0.0f : of_rows.y;
#pragma unroll
  for (int i = 0; i < 32; ++i) b[i] = i & 2 ? high : low;
}

// dg of one gate a token, this key tile's part, from e, 2^-B with its sign, and what it has from beyond the chunk.
template <class View>
__device__ __forceinline__ void store_token_gates(const View& view, const PairPlace& at, int rows, const Accumulator& e,
                                                  const float* signs, const float* run, float* row_sums, int thread) {
  const Params& p = view.p;
  const int warp = thread >> 5, lane = thread & 31;
  float sums[2] = {};
#pragma unroll
  for (int i = 0; i < 32; ++i) sums[(i >> 1) & 1] += e[i] * signs[column_of_element(thread, i)];
  const float low = sum_of_quad(sums[0]), high = sum_of_quad(sums[1]);
  View::meet_group();  // the gates in row_sums have been read
  if ((lane & 3) == 0) {
    row_sums[row_of_element(thread, 0)] = low;
    row_sums[row_of_element(thread, 2)] = high;
  }
  View::meet_group();
  if (warp == 0) {
    const float even = row_sums[2 * lane], odd = row_sums[2 * lane + 1];
    const float from_beyond = flashgla::cuda::warp_sum(run[lane] + run[lane + 32]);
    float after = __shfl_down_sync(0xffffffffu, sum_to_come(even + odd, lane), 1);
    after = from_beyond + (lane < 31 ? after : 0.0f);
    const Sequences& s = p.sequences;
    const std::int64_t tokens = s.cu_seqlens ? s.length : s.count * s.length;
    const std::int64_t token = (s.cu_seqlens ? 0 : at.batch * s.length) + at.token + view.part() * kChunk;
    float* to = view.w.gate_parts + (at.key_tile * tokens + token + 2 * lane) * p.heads + at.kv_head;
    if (2 * lane < rows) to[0] = after + odd + even;
    if (2 * lane + 1 < rows) to[p.heads] = after + odd;
  }
}

// e as a sum of numbers of bf16, a tile each.
template <class Core, int kParts>
__device__ __forceinline__ void put_parts(const std::uint32_t (&tiles)[3], Accumulator& e, int thread) {
#pragma unroll
  for (int part_of = 0; part_of < kParts; ++part_of) {
#pragma unroll
    for (int k16 = 0; k16 < 4; ++k16) {
      std::uint32_t r[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) r[i] = take_bf16(e[8 * k16 + 2 * i], e[8 * k16 + 2 * i + 1]);
      Core::put_fragment(tiles[part_of], r, k16, thread_shuffled<Core>(thread));
    }
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
