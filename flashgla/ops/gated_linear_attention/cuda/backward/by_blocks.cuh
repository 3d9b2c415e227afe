// What dq and dk of a chunk by blocks (tiles/ladder.cuh) are made with: keys_gradients.cuh, channels_by_blocks.cuh.
//
// With a_ij = do_i v_j of the pairs inside the chunk and x_i, y_j what comes from beyond it,
//     dq_i = 2^G_i x_i + sum_j a_ij k_j 2^(G_i - G_j)      dk_j = 2^(sum of later gates) y_j + scale sum_i a_ij q_i
//     2^(..)
// Sums over k' (scale q') go from block to block, beginning with what comes from beyond the chunk; the f32 accumulator
// is multiplied by the factor of the two anchors in between. dg wants q dq and k dk, in which a pair's terms must
// cancel: they are taken as scale q' and k' (at a level X) times the accumulators before the last factor, so that both
// hold the same rounded products.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/tiles/ladder.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// What e is summed up in may also be of a kind of its own, with this function for it.
template <bool kAdd, template <class, int> class Kept>
__device__ __forceinline__ void add_eight(Kept<float, 32>& e, int k16, const float (&more)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) e.x[8 * k16 + i] = (kAdd ? e.x[8 * k16 + i] : 0.0f) + more[i];
}

// In registers without a branch, by which two of them would become one of two places in memory.
__device__ __forceinline__ void add_where(bool wanted, float& to, float more) { to = wanted ? to + more : to; }
__device__ __forceinline__ void add_where(bool wanted, volatile float& to, float more) {
  if (wanted) to = to + more;
}

// The pairs inside a block that is not near, by halving, to dq (kQueries) and dk (kKeys), and to e as q dq and, times
// sign_of_keys, k dk; those of a token with itself, in which no gate is, not to e: of strong gates dg is far smaller.
// block: a of the block, either way up; of k-step k16 queries(x, k16) and keys(x, k16) give q and k as loaded. A
// level's product has a query's dq in a query's row and a key's dk in a key's: both cost what one does. scores: if
// wanted, those of the block. mirrored: dq and dk, q and k have changed places.
template <bool kQueries, bool kKeys, class Floats, class Sums, class Queries, class Keys>
static __device__ __forceinline__ void add_halves(Floats& dq, Floats& dk, Sums& e, float sign_of_keys,
                                                  const std::uint32_t (&block)[4], Queries queries, Keys keys,
                                                  const Accumulator& sums, float scale, int thread,
                                                  Local<float, 8>* scores = nullptr, bool mirrored = false) {
  constexpr bool kInMemory = std::is_volatile_v<std::remove_extent_t<Floats>>;
  constexpr int kDiagonals = kQueries && kKeys && kInMemory ? 1 : 4;
  const int lane = thread % 32, row = lane / 4, column = 2 * (lane % 4);
  std::uint32_t both[4];  // pairs of the block, mirrored
  both[0] = block[0] | ptx::transpose_matrix(block[0]);
  both[1] = block[1] | ptx::transpose_matrix(block[2]);
  both[2] = block[2] | ptx::transpose_matrix(block[1]);
  both[3] = block[3] | ptx::transpose_matrix(block[3]);
  const auto multiply = [](float(&part)[8], const std::uint32_t(&a)[4], const std::uint32_t(&x)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::uint32_t first = ptx::transpose_matrix(x[2 * half]), second = ptx::transpose_matrix(x[2 * half + 1]);
      TensorCore80::multiply(part + 4 * half, a, first, second);
    }
  };
#pragma unroll 1
  for (int size = kBlockTokens / 2; size > 0; size /= 2) {
    const std::uint32_t mask = (of_level(row, column, size) ? 0xffffu : 0u) |
                               (of_level(row, column + 1, size) ? 0xffff0000u : 0u),
                        crossing = size == 8 ? ~0u : 0u, inside = size == 8 ? 0u : mask;
    const std::uint32_t a[4] = {both[0] & inside, both[1] & crossing, both[2] & crossing, both[3] & inside};
    float s[8] = {};
#pragma unroll
    for (int k16 = 0; k16 < 4; ++k16) {
      std::uint32_t q[4], k[4], x[4];
      float w[8], part[8] = {}, more[8] = {};
      if (scores != nullptr) __syncwarp();  // or ptxas loads ahead what it has no registers for
      queries(q, k16);
      keys(k, k16);
      level_of_block(x, w, size, k16, q, k, sums, lane, mirrored);
      multiply(part, a, x);
      if (scores != nullptr) multiply_level(s, x, x);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool query = size == 8 ? i & 1 : (row & size) != 0;
        if (query ? !kQueries : !kKeys) continue;
        const float2 own = ptx::unpack_bf16(x[i]);
        const bool first = query != mirrored;
        const float sign = first ? 1.0f : sign_of_keys;
#pragma unroll
        for (int f = 0; f < 2; ++f) {
          const int at = 8 * k16 + 2 * i + f;
          const float scaled = scale * part[2 * i + f];
          const float to = w[2 * i + f] * (query ? part[2 * i + f] : scaled);
          if constexpr (kQueries) add_where(!kKeys || first, dq[at], to);
          if constexpr (kKeys) add_where(!kQueries || !first, dk[at], to);
          more[2 * i + f] = sign * ((f == 0 ? own.x : own.y) * scaled);
        }
      }
      add_eight<true>(e, k16, more);
    }
    if (scores != nullptr) add_level(scores->x, s, size, lane);
  }
  const int again = fresh_shuffled() % 32, own = again / 4, first = 2 * (again % 4);
  const std::uint32_t mask = (own == first ? 0xffffu : 0u) | (own == first + 1 ? 0xffff0000u : 0u);
  const std::uint32_t diagonal[4] = {both[0] & mask, 0, 0, both[3] & mask};
#pragma unroll kDiagonals
  for (int k16 = 0; k16 < 4; ++k16) {
    const auto add = [&](Floats& d, auto operand, float factor) {
      std::uint32_t x[4];
      float part[8] = {};
      operand(x, k16);
      multiply(part, diagonal, x);
#pragma unroll
      for (int i = 0; i < 8; ++i) d[8 * k16 + i] = d[8 * k16 + i] + factor * part[i];
    };
    if constexpr (kQueries) add(dq, keys, mirrored ? scale : 1.0f);
    if constexpr (kKeys) add(dk, queries, mirrored ? 1.0f : scale);
  }
  if (scores != nullptr) {
    float s[8] = {};
#pragma unroll
    for (int k16 = 0; k16 < 4; ++k16) {
      std::uint32_t q[4], k[4];
      queries(q, k16);
      keys(k, k16);
      multiply_level(s, q, k);
    }
    add_level(scores->x, s, 0, again);
  }
}
template <class From>
__device__ __forceinline__ auto operand_of(const From& from) {  // k-step k16 of 16 registers
  return [&from](std::uint32_t(&x)[4], int k16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = from[4 * k16 + i];
  };
}

// ---- one code for dq and dk ----
// What queries are to the keys of earlier blocks, back to the chunk's start, keys are to the queries of later ones, up
// to its end. So with time mirrored, where rows are those of keys, both are made by one code.

// Factors of the warp's block, in the order in which others are added to it: from the chunk's start (mirrored: its end)
// to the first one's keys' anchor, from each to the next, and from the last to the queries' (mirrored: the same with
// keys and queries in each other's place); of its own the root. Returns the exponent from the anchor of its rows to
// that start.
__device__ __forceinline__ float2 put_factors(std::uint32_t room, bool mirrored, int warp, int lane) {
  const int own = mirrored ? kBlocks - 1 - warp : warp;
  const float2 none = make_float2(0.0f, 0.0f);
  float2 before = none, from_start = none;
#pragma unroll
  for (int t = 0; t < kBlocks; ++t) {
    const int block = mirrored ? kBlocks - 1 - t : t;
    const float2 half = load_shared_float2(block_half(room, block) + 8 * lane),
                 total = load_shared_float2(block_total(room, block) + 8 * lane);
    const bool near = half.x <= 0.0f;
    const float2 rest = make_float2(total.x - half.x, total.y - half.y), to = mirrored ? rest : half,
                 after = mirrored ? half : rest;
    float2 exponent = near ? to : t == own ? none : total;
    if (t == own) from_start = sum_of(from_start, exponent);
    if (t < own) from_start = sum_of(from_start, total);
    exponent = sum_of(exponent, before);
    if (t == own) exponent = half_of(exponent);
    store_shared_float2(block_factor(room, warp, t) + 8 * lane, power_of(exponent));
    before = near ? after : none;
  }
  return from_start;
}
// Sums from the block's start become exponents of the warp's rows: from the queries' anchor, mirrored to the keys'.
__device__ __forceinline__ void exponents_from_anchor(Accumulator& sums, std::uint32_t room, bool near, bool mirrored,
                                                      int thread) {
  const int warp = thread / 32;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float2 anchor = make_float2(0.0f, 0.0f);
    if (near || mirrored) {
      anchor = of_columns(near ? block_half(room, warp) : block_total(room, warp), i / 4, i % 4, thread);
    }
    const float x = sums[2 * i] - anchor.x, y = sums[2 * i + 1] - anchor.y;
    sums[2 * i] = mirrored ? -x : x;
    sums[2 * i + 1] = mirrored ? -y : y;
  }
}
// Elements 8 k16 + 2 i and the next.
__device__ __forceinline__ auto two_of(const Accumulator& a) {
  return [&a](int k16, int i) { return make_float2(a[8 * k16 + 2 * i], a[8 * k16 + 2 * i + 1]); };
}
// Two neighbours x as loaded times factor and their powers.
__device__ __forceinline__ float2 gated(std::uint32_t x, float factor, float2 power) {
  const float2 pair = ptx::unpack_bf16(x);
  return make_float2(pair.x * (factor * power.x), pair.y * (factor * power.y));
}
// Rows as loaded times factor and 2^exponent(k16, i), in the warp's rows of a tile; visit(i, register i of the rows'
// operand before it is rounded).
template <class Core, class Exponent, class Visit>
__device__ __forceinline__ void put_gated(std::uint32_t tile, const std::uint32_t (&x)[16], float factor, int thread,
                                          Exponent exponent, Visit visit) {
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    std::uint32_t r[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 y = gated(x[4 * k16 + i], factor, power_of(exponent(k16, i)));
      visit(4 * k16 + i, y);
      r[i] = ptx::pack_bf16(y.x, y.y);
    }
    Core::put_fragment(tile, r, k16, thread);
  }
}
// d times 2^exponent(k16, i).
template <class Exponent>
__device__ __forceinline__ void scale_by_powers(Accumulator& d, Exponent exponent) {
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 power = power_of(exponent(k16, i));
      d[8 * k16 + 2 * i] *= power.x;
      d[8 * k16 + 2 * i + 1] *= power.y;
    }
  }
}
// d: what comes from beyond the chunk, to which the pairs come but those inside a block that is not near; what is left
// are the exponents of its rows. pairs(a, k16): a, rows as d's, zero where the query is before the key; other_tile: k'
// (mirrored: scale q'); room: this warp's put_factors. A loop: of code that is in no cache there is less to wait for.
template <class Pairs>
__device__ __forceinline__ void add_blocks(Accumulator& d, Pairs pairs, std::uint32_t other_tile, std::uint32_t room,
                                           bool near, bool mirrored, int thread) {
  const int warp = thread / 32, step = mirrored ? -1 : 1;
  const auto add = [&](int t) {
    std::uint32_t a[4];
    pairs(a, t);
    TensorCore80::add_step<Stored::k_outer>(d, a, other_tile, t, thread);
  };
  int t = mirrored ? kBlocks - 1 : 0;
  std::uint32_t factors = block_factor(room, warp, 0) + 8 * (thread % 4);
#pragma unroll 1
  for (; t != warp; t += step, factors += 256) {
    scale_columns_at(d, factors);
    add(t);
  }
  scale_columns_at(d, factors);
  scale_columns_at(d, factors);
  if (near) add(t);
}
// Of k-step k16 what a tile has in the warp's rows times d.
__device__ __forceinline__ void multiply_rows(float (&e)[8], std::uint32_t tile, const Accumulator& d, int k16,
                                              int thread) {
  std::uint32_t x[4];
  TensorCore80::load_a<Stored::k_inner>(x, tile, k16, thread);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = ptx::unpack_bf16(x[i]);
    e[2 * i] = pair.x * d[8 * k16 + 2 * i];
    e[2 * i + 1] = pair.y * d[8 * k16 + 2 * i + 1];
  }
}
// e: these times sign. kAdd: to what is there.
template <bool kAdd, class Sums>
__device__ __forceinline__ void sum_products(Sums& e, float sign, const Accumulator& d, std::uint32_t tile,
                                             int thread) {
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    float more[8];
    __syncwarp();
    multiply_rows(more, tile, d, k16, thread);
#pragma unroll
    for (int i = 0; i < 8; ++i) more[i] *= sign;
    add_eight<kAdd>(e, k16, more);
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
