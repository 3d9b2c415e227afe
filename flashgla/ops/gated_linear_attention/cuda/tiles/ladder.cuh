// The rungs below one anchor a chunk, for key gates of any strength (README.md, "The ladder").
//
// A chunk's 64 tokens are four blocks of 16, each the rows of one warp. A block is near while no channel falls by more
// than kBlockReach bits over either half of it; its anchor, for queries and for keys, is its middle. Of other blocks
// the queries' anchor is the block's start and the keys' its end. With L_i the sum of the gates from the block's start
// to token i (base 2), a the block's anchor for queries and c that for keys,
//     q'_i = q_i 2^(L_i - a)      k'_j = k_j 2^(c - L_j)      P_ij = q'_i k'_j 2^(gates between the two anchors).
// The last factor belongs to a channel and a pair of blocks, so it is never an operand's: queries are multiplied by it
// from one block of keys to the one before, in registers. It is at most 1, as are q'_i and k'_j outside near blocks.
// Pairs inside a block that is not near go by halving inside the warp (halve_block), exact for any gates.
// The first factor that queries (or keys) 2^kBlockReach large meet may be 2^(-2 kBlockReach), so it is applied as its
// square root, twice.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/tiles/block_sums.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// ---- halving inside a block ----
// At level s (8, 4, 2, 1) tokens lie in blocks of s; a pair whose highest different bit is s has the end of the even
// block before the query as anchor. A token is then either a query or a key, so one operand X holds both, each element
// times its power W, whose exponents are sums of gates between a token and the anchor: at most 0.

// Of k-step k16 the operand X, from q's and k's (mirrored: from k's and q's), and W where an accumulator has its
// elements.
__device__ __forceinline__ void level_of_block(std::uint32_t (&x)[4], float (&w)[8], int size, int k16,
                                               const std::uint32_t (&q)[4], const std::uint32_t (&k)[4],
                                               const Accumulator& sums, int lane, bool mirrored = false) {
  const int row = lane / 4, anchor = size == 8 ? 7 : (row & ~(2 * size - 1)) + size - 1;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int at = 8 * k16 + 2 * i;
    const bool query = size == 8 ? i & 1 : (row & size) != 0;
    float power[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float from = i & 1 ? (size == 8 ? sums[at - 2 + e] : sums[at + e]) : sums[at + e];
      const float there = __shfl_sync(0xffffffffu, from, 4 * anchor + lane % 4);
      power[e] = ptx::exp2(-fabsf(sums[at + e] - there));
      w[2 * i + e] = power[e];
    }
    const float2 pair = ptx::unpack_bf16(query != mirrored ? q[i] : k[i]);
    x[i] = ptx::pack_bf16(pair.x * power[0], pair.y * power[1]);
  }
}
constexpr int kLevelsAtOnce = 2;
// Whether a pair of tokens of 8, or one of such a half and one of the other, belongs to a level, in either order.
__device__ __forceinline__ bool of_level(int row, int column, int size) {
  return size == 0 ? row == column : ((row ^ column) & -size) == size;
}

// The scores of the pairs inside the warp's block, level by level, as columns 0..15 of an accumulator: a k-step's
// products of a level's X, or of q and k of the tokens with themselves (level 0); what of them belongs to the level;
// and, of all levels, what is not above the diagonal.
__device__ __forceinline__ void multiply_level(float (&s)[8], const std::uint32_t (&rows)[4],
                                               const std::uint32_t (&columns)[4]) {
  TensorCore80::multiply(s, rows, columns[0], columns[2]);
  TensorCore80::multiply(s + 4, rows, columns[1], columns[3]);
}
template <class Floats>
__device__ __forceinline__ void add_level(Floats& found, const float (&s)[8], int size, int lane) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const bool mine = of_level(lane / 4, 2 * (lane % 4) + e, size);
    found[e] = found[e] + (mine ? s[e] : 0.0f);
    found[2 + e] = found[2 + e] + (size == 8 ? s[2 + e] : 0.0f);
    found[6 + e] = found[6 + e] + (mine ? s[6 + e] : 0.0f);
  }
}
template <class From, class To>
__device__ __forceinline__ void finish_levels(const From& found, To& scores, float scale, int lane) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const bool above = (i < 2 || i > 5) && 2 * (lane % 4) + i % 2 > lane / 4;
    scores[i] = above ? 0.0f : scale * found[i];
  }
}

// All of them, times scale. Of k-step k16 queries(x, k16) and keys(x, k16) give q and k as loaded.
template <class Queries, class Keys>
static __device__ __forceinline__ void halve_block(Local<float, 8>& scores, Queries queries, Keys keys,
                                                   const Accumulator& sums, float scale, int lane) {
  float found[8] = {};
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    std::uint32_t q[4], k[4];
    __syncwarp();
    queries(q, k16);
    keys(k, k16);
#pragma unroll kLevelsAtOnce
    for (int size = kBlockTokens / 2; size > 0; size /= 2) {
      std::uint32_t x[4];
      float w[8], s[8] = {};
      level_of_block(x, w, size, k16, q, k, sums, lane);
      multiply_level(s, x, x);
      add_level(found, s, size, lane);
    }
    float s[8] = {};
    multiply_level(s, q, k);
    add_level(found, s, 0, lane);
  }
  finish_levels(found, scores.x, scale, lane);
}

// Adds the scores of the warp's queries, q 2^(L - a) in f32, which become q 2^G (but for block 0's own, by its factor
// too). inside: of the pairs inside a block that is not near, or none; keys_tile: k', of all warps; room:
// put_block_factors.
__device__ __forceinline__ void add_scores(Accumulator& scores, Accumulator& queries, const Local<float, 8>* inside,
                                           std::uint32_t keys_tile, std::uint32_t room, bool near) {
  const auto warp = [] { return fresh_thread() / 32; };
  const std::uint32_t own_factors = block_factor(room, warp(), 0) + 8 * (fresh_thread() % 4);
#pragma unroll
  for (int t = kBlocks - 1; t >= 0; --t) {
    if (t > warp()) continue;
    if (t == warp() && !near) {
#pragma unroll
      for (int i = 0; i < 8; ++i) scores[8 * t + i] += inside == nullptr ? 0.0f : inside->x[i];
    } else {
#pragma unroll
      for (int k16 = 0; k16 < 4; ++k16) {
        std::uint32_t a[4];
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = ptx::pack_bf16(queries[8 * k16 + 2 * i], queries[8 * k16 + 2 * i + 1]);
        TensorCore80::add_step<Stored::k_inner, 2>(scores + 8 * t, a, keys_tile, k16, fresh_thread(), 2 * t);
      }
    }
    scale_columns_at(queries, own_factors + 256 * t);
    if (t == warp()) scale_columns_at(queries, own_factors + 256 * t);
  }
}

// Exponents of the warp's queries from their anchor, or of keys to theirs.
template <bool kQueries>
__device__ __forceinline__ float2 own_exponent(const Accumulator& sums, std::uint32_t room, bool near, int k16, int i,
                                               int thread) {
  const int at = 8 * k16 + 2 * i, warp = thread / 32;
  float2 anchor = make_float2(0.0f, 0.0f);
  if (near || !kQueries) anchor = of_columns(near ? block_half(room, warp) : block_total(room, warp), k16, i, thread);
  return kQueries ? make_float2(sums[at] - anchor.x, sums[at + 1] - anchor.y)
                  : make_float2(anchor.x - sums[at], anchor.y - sums[at + 1]);
}

// ---- the forward's: scores and gated operands of a chunk ----

// By a group of 128 threads, from q and k as loaded: the scores [query][key] come to `scores`, those above the diagonal
// as it may be, and q 2^G and k 2^(sum of later gates) in place, q and scores times scale. x_tile: room for a tile; the
// gates may lie there. sum_gates(sums, thread): sum_block of the warp's rows. take_sums(of the chunk, of channels 2
// lane and the next; whether each block is near), by all warps. What others of the block read of the tiles they have
// read before. For kernels short of registers: kAside: q waits in local memory; kFresh: nothing holds the barrier's
// number.
template <class Core, bool kAside = false, bool kFresh = false, class SumGates, class TakeSums>
__device__ __forceinline__ void gate_by_blocks(Accumulator& scores, std::uint32_t q_tile, std::uint32_t k_tile,
                                               std::uint32_t x_tile, float scale, SumGates sum_gates,
                                               TakeSums take_sums) {
  const auto sync = [] {
    if constexpr (kFresh) {
      sync_fresh_group();
    } else {
      sync_group();
    }
  };
  constexpr int kToEnd = kBlocks;     // after the queries' factors
  const std::uint32_t room = q_tile;  // until it gets q 2^G
  std::uint32_t loaded[16];
  load_operand<Stored::k_inner>(loaded, q_tile, fresh_thread());
  std::conditional_t<kAside, Local<std::uint32_t, 16>, Held<std::uint32_t, 16>> waiting;
  waiting.put(loaded);
  const auto queries_of = [&](std::uint32_t(&q)[4], int k16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) q[i] = waiting.x[4 * k16 + i];
  };
  const auto keys_of = [&](std::uint32_t(&k)[4], int k16) {
    TensorCore80::load_a<Stored::k_inner>(k, k_tile, k16, fresh_thread());
  };
  Accumulator sums;
  sum_gates(sums, fresh_thread());
  __syncwarp();
  const bool near = is_near(sums, fresh_thread() % 32);
  publish_block(room, sums, near, fresh_thread());
  Local<float, 8> inside;
  if (!near) halve_block(inside, queries_of, keys_of, sums, scale, fresh_thread() % 32);
  sync();
  {
    const int warp = fresh_thread() / 32, lane = fresh_thread() % 32;
    const BlockSums blocks = read_blocks(room, lane);
    put_block_factors(room, blocks, warp, lane);
    store_shared_float2(block_factor(room, warp, kToEnd) + 8 * lane, factor_to_end(blocks, warp));
    take_sums(sum_of_blocks(blocks), each_is_near(room));
  }
  __syncwarp();
  Accumulator queries;
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    std::uint32_t q[4], k[4], gated[4], later[4];
    __syncwarp();  // or ptxas loads ahead what it has no registers for
    const int thread = fresh_thread(), warp = thread / 32;
    queries_of(q, k16);
    keys_of(k, k16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 8 * k16 + 2 * i;
      const float2 of_query = own_exponent<true>(sums, room, near, k16, i, thread),
                   of_key = own_exponent<false>(sums, room, near, k16, i, thread),
                   to_end = of_columns(block_factor(room, warp, kToEnd), k16, i, thread);
      const float2 query = ptx::unpack_bf16(q[i]), key = ptx::unpack_bf16(k[i]);
      queries[at] = query.x * (scale * ptx::exp2(of_query.x));
      queries[at + 1] = query.y * (scale * ptx::exp2(of_query.y));
      const float first = key.x * ptx::exp2(of_key.x), second = key.y * ptx::exp2(of_key.y);
      gated[i] = ptx::pack_bf16(first, second);
      later[i] = ptx::pack_bf16(first * to_end.x, second * to_end.y);
    }
    Core::put_fragment(x_tile, gated, k16, thread);
    Core::put_fragment(k_tile, later, k16, thread);
  }
  sync();
  add_scores(scores, queries, &inside, x_tile, room, near);
  __syncwarp();
  put_rounded<Core>(q_tile, queries, fresh_thread());
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
