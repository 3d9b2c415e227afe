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

// Rows of q (k) as they are, to where q~ (k~) was.
template <bool kQueries, class View>
__device__ __forceinline__ void load_again(const View& view, const PairPlace& at, int thread) {
  const Params& p = view.p;
  const int head = kQueries ? at.kv_head * p.group + at.in_group : at.kv_head;
  load_tile(view.own_tile(kQueries ? View::Layout::q : View::Layout::k),
            view.rows_at(at, kQueries ? p.q : p.k, 2, head, at.key_tile * kTile, p.key_dim), thread);
  ptx::copy_async_commit();
}

// Of a tile that falls by more than kSteep, by blocks: across and within from what reaches beyond the chunk to dq over
// the scale and dk, but for the powers of b that they leave with, and scale q dq - k dk. kReload: another query
// head has had the gates' place.
template <bool kReload, class View, template <class, int> class Kept>
__device__ __forceinline__ void finish_steep_pair(const View& view, const PairPlace& at, int rows, Accumulator& across,
                                                  Accumulator& within, Accumulator& b, Kept<float, 32>& steep_e,
                                                  int thread) {
  using Core = typename View::Core;
  using Layout = typename View::Layout;
  constexpr GatesAs kGate = View::kGate;
  const Params& p = view.p;
  const bool late = view.late;
  const int channel = at.key_tile * kTile;
  const std::uint32_t own_q = view.own_tile(Layout::q), own_k = view.own_tile(Layout::k),
                      own_a = view.own_tile(Layout::a), own_gates = view.own_tile(Layout::gates);
  ColumnParts& by_keys = view.parts(view.part());
  View::meet();
  if (late) {
    load_again<true>(view, at, thread);
  } else {
    load_again<false>(view, at, thread);
  }
  const auto await_rows = [] {
    ptx::copy_async_wait<0>();
    __syncwarp();  // a warp reads what it has loaded
  };
  if constexpr (kReload && kGate == GatesAs::bf16) {
    view.load_gates(at);
    ptx::copy_async_wait<0>();
    view.turn_gates(at);
    __syncwarp();
  }
  finish_by_blocks<Core>(
      across, within, b, steep_e, !late, late ? own_q : own_k, late ? own_k : own_q, own_a, own_gates, p.scale,
      [&](Accumulator& sums, int thread) {
        if constexpr (kGate == GatesAs::bf16) {
          sum_block(sums, own_gates, thread);
        } else if constexpr (kGate == GatesAs::f32) {
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
      await_rows,
      [&](const Accumulator& beyond_keys, float2 to_end) {
        const int thread = fresh_thread();
        sum_beyond(by_keys, view.shared + view.own(Layout::k), beyond_keys, thread);
        by_keys[thread / 32][2 * (thread % 32)] *= to_end.x;
        by_keys[thread / 32][2 * (thread % 32) + 1] *= to_end.y;
      });
#pragma unroll
  for (int i = 0; i < 32; ++i) b[i] *= (late ? 1.0f : -1.0f) / (View::kTileOfGates ? kLog2E : 1.0f);
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

// Running sums of gates of one a token, where an accumulator has its elements; of a steep tile b is there.
template <class View>
__device__ __forceinline__ void sum_token_gates(const View& view, Accumulator& b, float* row_sums, bool steep,
                                                int thread) {
  if (thread < kTile) {
    row_sums[thread] = ptx::larger_or_nan(view.floats(view.own(View::Layout::gates))[thread] * kLog2E, kStrongest);
  }
  View::meet_group();
  const float2 of_rows = token_sums(ptx::shared_address(row_sums), thread);
#pragma unroll
  for (int i = 0; i < 32; ++i) b[i] = steep ? b[i] : i & 2 ? of_rows.y : of_rows.x;
}

// dg of one gate a token, this key tile's part, from sums of e over a thread's rows, and what it has from beyond the
// chunk.
template <class View>
__device__ __forceinline__ void store_token_gates(const View& view, const PairPlace& at, int rows, float2 rows_of_e,
                                                  const float* run, float* row_sums, int thread) {
  const Params& p = view.p;
  const int warp = thread >> 5, lane = thread & 31;
  View::meet_group();  // the gates in row_sums have been read
  if ((lane & 3) == 0) {
    row_sums[row_of_element(thread, 0)] = rows_of_e.x;
    row_sums[row_of_element(thread, 2)] = rows_of_e.y;
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
