// Gradients of one chunk, head after head: dq and dk stay on chip as sums over the heads, and so do the gradients of
// the scores, whose products with q and k come once at the end. README.md has the equations.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/shared_keys/launch.h"
#include "flashgla/ops/gated_linear_attention/cuda/shared_keys/parts.cuh"

namespace flashgla::ops::gated_linear_attention::cuda::shared_keys {

constexpr int kGradientThreads = 2 * kGroupThreads;

// What dg is made of: each warp writes what it has, and one warp adds up.
struct TokenSums {
  float gates[8][kChunk];    // a copy a warp
  float queries[2][kChunk];  // q_i . (d_o_i through the chunk's first state), of a half of the channels
  float keys[2][kChunk];     // k_j . (v_j through the gradient of the state at the end)
  float rows[4][kChunk];     // sums over keys of a row group of scores times their gradients, for each query
  float columns[2][kChunk];  // sums over a half of the queries, for each key
  float states[8];           // parts of <h, dh>
};

// Shared memory: q and k; two stages of v, d_o, the state and its gradient; parts of dv; numbers a token.
template <int kTiles>
struct GradientsPlan {
  static constexpr int stage_bytes = (2 + 2 * kTiles) * kTileBytes;
  static constexpr int stages = 2 * kTiles * kTileBytes;
  static constexpr int parts = stages + 2 * stage_bytes;
  static constexpr int sums = parts + kChunk * kTile * static_cast<int>(sizeof(float));
  static constexpr int bytes = sums + static_cast<int>(sizeof(TokenSums));
};

// dg of tokens 2 lane and the next: what reaches from before a token to it or beyond. By one warp.
__device__ __forceinline__ float2 gate_gradients(const TokenSums& s, float decay, int lane) {
  float behind[2], ahead[2], states = 0.0f;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int t = 2 * lane + e;
    behind[e] = s.queries[0][t] + s.queries[1][t] + (s.rows[0][t] + s.rows[1][t] + s.rows[2][t] + s.rows[3][t]) -
                (s.columns[0][t] + s.columns[1][t]);
    ahead[e] = s.keys[0][t] + s.keys[1][t];
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) states += s.states[i];
  const float later = sum_of_lanes_behind(behind[0] + behind[1], lane) + behind[1];
  const float earlier = sum_of_lanes_before(ahead[0] + ahead[1], lane);
  return make_float2(states * decay + (later + behind[0]) + earlier, states * decay + later + (earlier + ahead[0]));
}

template <int kTiles>
__global__ void __launch_bounds__(kGradientThreads, 1)
    gradients_kernel(const __grid_constant__ Params p, const __grid_constant__ ChunkGradients d, const int heads_each) {
  using Plan = GradientsPlan<kTiles>;
  using Core = TensorCore80;
  constexpr int kColumns = 4 * kTiles;  // blocks of 8 channels in half of K
  extern __shared__ __align__(1024) char memory[];
  const std::uint32_t base = ptx::shared_address(memory);
  TokenSums& sums = *reinterpret_cast<TokenSums*>(memory + Plan::sums);
  const int thread = static_cast<int>(threadIdx.x), own = thread & (kGroupThreads - 1), lane = thread & 31;
  // Warps in rows of 16 tokens and two halves: of K, of a chunk's queries, of V.
  const int warp = __shfl_sync(kWarp, thread >> 5, 0), block = warp & 3, half = warp >> 2;
  const std::int64_t chunk = blockIdx.x, n = sequence_of_chunk(p.sequences, chunk);
  if (n < 0) return;
  const Span span = span_of(p.sequences, n);
  const ChunkPlace place(span, (chunk - span.chunk_begin) * kChunk);
  const int begin = static_cast<int>(blockIdx.y) * heads_each;
  const int row = 16 * block + lane / 4;     // and 8 further
  const bool sees = half == 1 || block < 2;  // some of the half's queries are not before all of the row group's keys
  // Where the half's channels are: the tile of two, or half a tile.
  const int tile_of_half = kTiles == 2 ? half : 0, first_column = kTiles == 2 ? 0 : kColumns * half;
  const std::uint32_t q_half = base + tile_of_half * kTileBytes, k_half = q_half + kTiles * kTileBytes;

  const auto stage_of = [&](int i) { return base + Plan::stages + (i & 1) * Plan::stage_bytes; };
  const auto load = [&](int i) {
    const std::uint32_t stage = stage_of(i);
    const std::int64_t state = p.state_tile(chunk, begin + i, 0, 0);
    const Strided& x = half == 0 ? p.v : d.d_o;
    const char* images = half == 0 ? static_cast<const char*>(p.states) : d.state_gradients;
    load_tile(stage + half * kTileBytes, rows_of(x, place, begin + i), own);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      copy_image(stage + (2 + half * kTiles + tile) * kTileBytes, images + state + tile * kImageBytes, own);
    }
    ptx::copy_async_commit();
  };

#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    load_tile(base + (half * kTiles + tile) * kTileBytes, rows_of(half == 0 ? p.q : p.k, place, 0, tile * kTile), own);
  }
  ptx::copy_async_commit();
  load(0);
  float2 gates = load_gates(p, place, begin);
  ptx::copy_async_wait<1>();
  __syncthreads();

  float dq[4 * kColumns] = {}, dk[4 * kColumns] = {};  // of this warp's 16 tokens and half of K
  float scores[16] = {}, d_scores[16] = {};            // rows keys, columns the half's queries
#pragma unroll
  for (int k16 = 0; k16 < 4 * kTiles; ++k16) {
    std::uint32_t a[4];
    Core::load_a<Stored::k_inner>(a, base + (kTiles + k16 / 4) * kTileBytes, k16 % 4, own);
    Core::add_step<Stored::k_inner, 4>(scores, a, base + k16 / 4 * kTileBytes, k16 % 4, own, 4 * half);
  }
  std::uint32_t k[kColumns / 2][4];
#pragma unroll
  for (int k16 = 0; k16 < kColumns / 2; ++k16) {
    Core::load_a<Stored::k_inner>(k[k16], k_half, first_column / 2 + k16, own);
  }

  // x (16 tokens by V, fragments) times a state's half^T, rows times the factors, added to a sum over heads; what the
  // rows of `beside` have in common with it, for both of the thread's rows.
  const auto through_state = [&](float(&sum)[4 * kColumns], const std::uint32_t(&x)[4][4], std::uint32_t state,
                                 std::uint32_t beside, float upper, float lower) {
    float2 common = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int begin = 0; begin < kColumns; begin += 4) {  // four columns at a time: there are no registers for more
      __syncwarp();
      float made[16] = {};
#pragma unroll
      for (int k16 = 0; k16 < 4; ++k16)
        Core::add_step<Stored::k_inner, 4>(made, x[k16], state, k16, own, first_column + begin);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int column = 8 * (first_column + begin + j) + 2 * (lane & 3);
        const float2 above = ptx::unpack_bf16(load_shared_4(beside + element_offset(row, column)));
        const float2 below = ptx::unpack_bf16(load_shared_4(beside + element_offset(row + 8, column)));
        float* const to = sum + 4 * (begin + j);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float x_h = made[4 * j + i] * (i < 2 ? upper : lower);
          to[i] += x_h;
          const float mine = i < 2 ? (i == 0 ? above.x : above.y) : (i == 2 ? below.x : below.y);
          (i < 2 ? common.x : common.y) += mine * x_h;
        }
      }
    }
    return sum_of_quad(common);
  };

#pragma unroll 1
  for (int i = 0; i < heads_each; ++i) {
    const GateSums g = sum_gates(gates, lane);
    float* const through = sums.gates[warp];
    __syncwarp();
    *reinterpret_cast<float2*>(through + 2 * lane) = make_float2(g.first, g.second);
    __syncwarp();
    if (i + 1 < heads_each) gates = load_gates(p, place, begin + i + 1);
    const float upper = through[row], lower = through[row + 8];
    ptx::copy_async_wait<0>();
    __syncthreads();
    if (i + 1 < heads_each) load(i + 1);
    const std::uint32_t v = stage_of(i), d_o = v + kTileBytes, h = d_o + kTileBytes, dh = h + kTiles * kTileBytes;

    {  // <h, dh>
      float common = 0.0f;
#pragma unroll
      for (int piece = 0; piece < 2 * kTiles; ++piece) {
        const std::uint32_t at = 16 * (thread + kGradientThreads * piece);
        float x[8], y[8];
        unpack_8(load_shared_16(h + at), x);
        unpack_8(load_shared_16(dh + at), y);
#pragma unroll
        for (int e = 0; e < 8; ++e) common = fmaf(x[e], y[e], common);
      }
      common = flashgla::cuda::warp_sum(common);
      if (lane == 0) sums.states[warp] = common;
    }
    std::uint32_t x[4][4];
#pragma unroll
    for (int k16 = 0; k16 < 4; ++k16) Core::load_a<Stored::k_inner>(x[k16], d_o, k16, own);
    const float2 queries = through_state(dq, x, h + tile_of_half * kTileBytes, q_half, ptx::exp2(upper) * p.scale,
                                         ptx::exp2(lower) * p.scale);
    const float upper_left = ptx::exp2(g.total - upper), lower_left = ptx::exp2(g.total - lower);
#pragma unroll
    for (int k16 = 0; k16 < 4; ++k16) Core::load_a<Stored::k_inner>(x[k16], v, k16, own);
    const float2 keys = through_state(dk, x, dh + tile_of_half * kTileBytes, k_half, upper_left, lower_left);

    // Scores' gradients, transposed as the scores are; weights[] become the decayed scores of dv's product.
    float column_sums[8] = {};  // over the row group's keys, of queries 8 j + 2 (lane % 4) and the next
    float2 row_sums = make_float2(0.0f, 0.0f);
    std::uint32_t weights[2][4];
    if (sees) {
      float made[16] = {};
#pragma unroll
      for (int k16 = 0; k16 < 4; ++k16) Core::add_step<Stored::k_inner, 4>(made, x[k16], d_o, k16, own, 4 * half);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int column = 32 * half + 8 * j + 2 * (lane & 3);
        const float2 there = *reinterpret_cast<const float2*>(through + column);
        float decayed[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int query = column + (e & 1), key = row + 8 * (e >> 1);
          const float reach =
              query >= key ? ptx::exp2((e & 1 ? there.y : there.x) - (e & 2 ? lower : upper)) * p.scale : 0.0f;
          const float gradient = made[4 * j + e] * reach;
          decayed[e] = scores[4 * j + e] * reach;
          d_scores[4 * j + e] += gradient;
          const float common = query > key ? scores[4 * j + e] * gradient : 0.0f;
          (e & 2 ? row_sums.y : row_sums.x) += common;
          column_sums[2 * j + (e & 1)] += common;
        }
        weights[j / 2][2 * (j % 2)] = ptx::pack_bf16(decayed[0], decayed[1]);
        weights[j / 2][2 * (j % 2) + 1] = ptx::pack_bf16(decayed[2], decayed[3]);
      }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        column_sums[j] += __shfl_xor_sync(kWarp, column_sums[j], distance);
      }
      if (lane < 4) sums.rows[block][32 * half + 8 * (j / 2) + 2 * lane + j % 2] = column_sums[j];
    }
    const float2 columns = sum_of_quad(row_sums);
    if ((lane & 3) == 0) {
      sums.queries[half][row] = queries.x;
      sums.queries[half][row + 8] = queries.y;
      sums.keys[half][row] = keys.x;
      sums.keys[half][row + 8] = keys.y;
      sums.columns[half][row] = columns.x;
      sums.columns[half][row + 8] = columns.y;
    }

    // dv: this half's channels through dh, and this half's queries.
    Accumulator dv;
    clear(dv);
#pragma unroll
    for (int k16 = 0; k16 < kColumns / 2; ++k16)
      Core::add_step<Stored::k_outer>(dv, k[k16], dh + tile_of_half * kTileBytes, first_column / 2 + k16, own);
    scale_rows(dv, upper_left, lower_left);
    if (sees) {
#pragma unroll
      for (int k16 = 0; k16 < 2; ++k16) Core::add_step<Stored::k_outer>(dv, weights[k16], d_o, 2 * half + k16, own);
    }
    // The two halves' parts: each gives the other half of V away, and has the sum of its own.
    float* const parts = reinterpret_cast<float*>(memory + Plan::parts);
#pragma unroll
    for (int e = 0; e < 16; ++e) parts[(16 * warp + e) * 32 + lane] = half == 0 ? dv[16 + e] : dv[e];
    __syncthreads();
    if (d.dv.data != nullptr) {
      float both[16];
#pragma unroll
      for (int e = 0; e < 16; ++e) {
        both[e] = (half == 0 ? dv[e] : dv[16 + e]) + parts[(16 * (warp ^ 4) + e) * 32 + lane];
      }
      const Rows to = rows_of(d.dv, place, begin + i);
      store_pieces(both, lane, [&](int r, int piece, uint4 words) {
        store_row_piece(to, 16 * block + r, 4 * half + piece, words);
      });
    }
    if (d.dg.data != nullptr && warp == (i & 7)) {
      const float2 dg = gate_gradients(sums, ptx::exp2(g.total), lane);
      const std::int64_t at = place.offset(d.dg, 2 * lane, begin + i);
      if (2 * lane < place.rows) store_as(p.gate_dtype, d.dg.data, at, dg.x);
      if (2 * lane + 1 < place.rows) store_as(p.gate_dtype, d.dg.data, at + d.dg.token, dg.y);
    }
  }

  __syncthreads();
  const std::uint32_t tile = stage_of(0);  // the scores' gradients, rows keys
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int column = 32 * half + 8 * j + 2 * (lane & 3);
    store_shared_4(tile + element_offset(row, column), ptx::pack_bf16(d_scores[4 * j], d_scores[4 * j + 1]));
    store_shared_4(tile + element_offset(row + 8, column), ptx::pack_bf16(d_scores[4 * j + 2], d_scores[4 * j + 3]));
  }
  __syncthreads();
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    std::uint32_t of_keys[4], of_queries[4], b[4];
    Core::load_a<Stored::k_inner>(of_keys, tile, k16, own);
    Core::load_a<Stored::k_outer>(of_queries, tile, k16, own);
#pragma unroll
    for (int j = 0; j < kColumns; j += 2) {
      Core::load_b<Stored::k_outer>(b, q_half, k16, first_column + j, own);
      Core::multiply(dk + 4 * j, of_keys, b[0], b[1]);
      Core::multiply(dk + 4 * j + 4, of_keys, b[2], b[3]);
      Core::load_b<Stored::k_outer>(b, k_half, k16, first_column + j, own);
      Core::multiply(dq + 4 * j, of_queries, b[0], b[1]);
      Core::multiply(dq + 4 * j + 4, of_queries, b[2], b[3]);
    }
  }
  const std::int64_t token = place.batch * p.sequences.length + place.token + row;
#pragma unroll
  for (int lower_row = 0; lower_row < 2; ++lower_row) {
    if (row + 8 * lower_row >= place.rows) continue;
    const std::int64_t at = ((blockIdx.y * d.tokens + token + 8 * lower_row) * p.key_dim) + kTile * tile_of_half +
                            8 * first_column + 2 * (lane & 3);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int e = 4 * j + 2 * lower_row;
      *reinterpret_cast<float2*>(d.dq + at + 8 * j) = make_float2(dq[e], dq[e + 1]);
      *reinterpret_cast<float2*>(d.dk + at + 8 * j) = make_float2(dk[e], dk[e + 1]);
    }
  }
}

// Sums over the splits, rounded: of dq (blockIdx.y 0) and dk, to a head's rows of a tensor. A thread has four channels.
constexpr int kSumThreads = 256;
struct SplitSums {
  const float* parts[2];  // [splits, tokens, K]
  Strided to[2];          // without data: not wanted
};
__global__ void __launch_bounds__(kSumThreads)
    sum_splits_kernel(const __grid_constant__ Params p, const __grid_constant__ SplitSums sums, std::int64_t tokens,
                      int splits) {
  flashgla::cuda::wait_for_previous();
  const std::int64_t at = (static_cast<std::int64_t>(blockIdx.x) * kSumThreads + threadIdx.x) * 4;
  const Strided& to = sums.to[blockIdx.y];
  if (at >= tokens * p.key_dim || to.data == nullptr) return;
  const float* const x = sums.parts[blockIdx.y] + at;
  float4 sum = *reinterpret_cast<const float4*>(x);
  for (int split = 1; split < splits; ++split) {
    const float4 more = *reinterpret_cast<const float4*>(x + split * tokens * p.key_dim);
    sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
  }
  const int log2_of_keys = p.key_dim == kTile ? 6 : 7;
  const auto token = static_cast<std::uint32_t>(at >> log2_of_keys),
             length = static_cast<std::uint32_t>(p.sequences.length), batch = token / length;
  auto* row = static_cast<__nv_bfloat16*>(to.data) + batch * to.batch + (token - batch * length) * to.token +
              (at & (p.key_dim - 1));
  *reinterpret_cast<uint2*>(row) = make_uint2(ptx::pack_bf16(sum.x, sum.y), ptx::pack_bf16(sum.z, sum.w));
}

}  // namespace flashgla::ops::gated_linear_attention::cuda::shared_keys
