// Pairs of tokens inside a chunk whose gates no single anchor spans: on tensor cores, and exact for any gates.
//
// At level s (32, 16, .., 1) the chunk's 64 tokens lie in blocks of s. Tokens i > j whose highest different bit is s
// lie in an odd block and in the even block before it. With the boundary between the two as anchor,
//     2^(G_i - G_j) = 2^(gates from the boundary to i) 2^(gates after j to the boundary):
// both exponents are sums of gates, never positive and never a difference of sums, so that a reset is as good as any
// other gate. At a level a token is either a query or a key: one tile X holds q's rows of odd blocks and k's of even
// ones, each element times its factor W, and
//     p_ij = (X X^T)_ij,   dq_i += W_i (a X)_i,   dk_j += W_j (a^T X)_j,   a: the pairs of this level, else 0.
// Every pair has its level; a token with itself needs no factor.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/tiles/tile.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// The gates come as Columns: kWarps warps share the 64 rows, kRows each; for the lane's channels 2 lane and 2 lane + 1,
// gate(i) is the base-2 gate of the warp's row i and total(w) the sum over the rows of warp w.

// Calls visit(row, sum of the gates from the start of the row's block of `size` tokens to the row) for the warp's rows.
template <class Columns, class Visit>
__device__ __forceinline__ void walk_up(const Columns& columns, int size, int warp, Visit visit) {
  constexpr int kRows = Columns::kRows;
  float2 run = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int w = 0; w < Columns::kWarps; ++w) {
    if (w < warp && ((kRows * w) & -size) == ((kRows * warp) & -size)) {
      const float2 total = columns.total(w);
      run.x += total.x;
      run.y += total.y;
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = kRows * warp + i;
    const float2 g = columns.gate(i);
    if ((row & (size - 1)) == 0) run = make_float2(0.0f, 0.0f);
    run.x += g.x;
    run.y += g.y;
    visit(row, run);
  }
}
// The same with the sum of the gates after the row, to the end of its block.
template <class Columns, class Visit>
__device__ __forceinline__ void walk_down(const Columns& columns, int size, int warp, Visit visit) {
  constexpr int kRows = Columns::kRows;
  float2 run = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int w = 0; w < Columns::kWarps; ++w) {
    if (w > warp && ((kRows * w) & -size) == ((kRows * warp) & -size)) {
      const float2 total = columns.total(w);
      run.x += total.x;
      run.y += total.y;
    }
  }
#pragma unroll
  for (int i = kRows - 1; i >= 0; --i) {
    const int row = kRows * warp + i;
    const float2 g = columns.gate(i);
    if (((row + 1) & (size - 1)) == 0) run = make_float2(0.0f, 0.0f);
    visit(row, run);
    run.x += g.x;
    run.y += g.y;
  }
}

// Two channels of a row of a tile times 2^exponent to the same place of another (or the same) tile. Returns the
// power.
__device__ __forceinline__ float2 gate_pair(std::uint32_t to, std::uint32_t from, int row, int lane, float2 exponent) {
  const std::uint32_t at = element_offset(row, 2 * lane);
  const float2 x = ptx::unpack_bf16(load_shared_4(from + at));
  const float2 factor = make_float2(ptx::exp2(exponent.x), ptx::exp2(exponent.y));
  store_shared_4(to + at, ptx::pack_bf16(x.x * factor.x, x.y * factor.y));
  return factor;
}

// The warp's rows of X at level `size`, from q and k as loaded; put(row, W of the lane's two channels).
template <class Columns, class Put>
__device__ __forceinline__ void put_level(std::uint32_t x_tile, std::uint32_t q_tile, std::uint32_t k_tile,
                                          const Columns& columns, int size, int warp, int lane, Put put) {
  // A warp whose rows lie in one block walks one way only.
  const bool one_block = size >= Columns::kRows, queries = (Columns::kRows * warp & size) != 0;
  if (!one_block || queries) {
    walk_up(columns, size, warp, [&](int row, float2 sum) {
      if (row & size) put(row, gate_pair(x_tile, q_tile, row, lane, sum));
    });
  }
  if (!one_block || !queries) {
    walk_down(columns, size, warp, [&](int row, float2 sum) {
      if (!(row & size)) put(row, gate_pair(x_tile, k_tile, row, lane, sum));
    });
  }
}

// d += (a where keeps(row, column), else 0) b; a: an operand of 16-bit elements, b_tile [k][n]. By 128 threads.
template <class Keeps>
__device__ __forceinline__ void add_masked_product(Accumulator& d, const std::uint32_t (&a)[16], std::uint32_t b_tile,
                                                   int thread, Keeps keeps) {
  const int row = row_of_element(thread, 0), column = column_of_element(thread, 0);
  std::uint32_t masked[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int r = row + 8 * (i & 1), c = column + 8 * (i / 2);
    masked[i] = a[i] & ((keeps(r, c) ? 0xffffu : 0u) | (keeps(r, c + 1) ? 0xffff0000u : 0u));
  }
  TensorCore80::product<Stored::k_outer>(d, masked, b_tile, thread);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
