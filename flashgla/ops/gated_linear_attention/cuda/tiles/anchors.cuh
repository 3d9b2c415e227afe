// The rung between one anchor a chunk and blocks on their own (README.md, "The ladder"), on wgmma: every block of 16
// tokens has its middle as the anchor of its queries and keys, as near blocks of tiles/ladder.cuh have, but a block is
// one k-step of a product, and between the products the accumulators go from one anchor to the next.
//
// m_t: the gates' sum (base 2) from the chunk's start to block t's anchor. In shared memory lie vectors of 64 factors,
// a channel each: 2^(m_0), 2^(m_t - m_(t-1)) for t = 1, 2, 3, and 2^(the sum after m_3); all at most 1. After them a
// vector of ones, for the rows that stay where they are: without branches ptxas keeps its products apart.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/tiles/ladder.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

constexpr float kLongest = 4096.0f;  // bits over a chunk, beyond which anchors are not tried
// Bits from one anchor to the next: the factor is no subnormal number, or an f32 one of 9 bits and more. What an anchor
// in a block's middle gives back, twice kBlockReach, is more than either.
constexpr float kLongestStep = 125.0f, kLongestSubnormal = 140.0f;

// The rung that a chunk is tried on: that of its neighbour that came before, as that one's gates would have it.
enum class Rung { one_anchor, anchors, half_blocks, blocks };

struct Anchors {
  static constexpr int kOnes = 2 * kBlocks + 1, bytes = 256 * (kOnes + 1);  // vectors of 256 bytes; half_blocks.cuh
  std::uint32_t shared;

  __device__ __forceinline__ std::uint32_t factor(int t) const { return shared + 256 * t; }
  // For rows that take part in the step to factor t, or ones.
  __device__ __forceinline__ std::uint32_t factor_if(bool takes_part, int t) const {
    return factor(takes_part ? t : kOnes);
  }
  // The factor of this thread's accumulator rows, which are channels.
  __device__ __forceinline__ float2 of_rows(int t, int thread) const {
    const std::uint32_t at = factor(t) + 4 * row_of_element(thread, 0);
    return make_float2(float_at(at), float_at(at, 8));
  }
  __device__ __forceinline__ void put_ones(int thread) const {  // by 64 threads or more
    if (thread < kTile) put_float(factor(kOnes), thread, 1.0f);
  }

  template <bool kSubnormal>
  static __device__ __forceinline__ float2 factors_of(float low, float high) {
    if constexpr (!kSubnormal) return make_float2(ptx::exp2(low), ptx::exp2(high));
    float2 y;
    asm("ex2.approx.f32 %0, %1;" : "=f"(y.x) : "f"(low));
    asm("ex2.approx.f32 %0, %1;" : "=f"(y.y) : "f"(high));
    return y;
  }
  // From a tile of gates, natural logarithms, visit(t, factor t of this thread's rows) for each; and whether they are
  // in reach: within a block's halves, and from anchor to anchor.
  template <bool kSubnormal, class Visit>
  static __device__ __forceinline__ bool find_factors(std::uint32_t g_tile, int thread, Visit visit) {
    constexpr std::uint32_t ones = 0x3f803f80;
    const bool odd = thread / 4 % 2 != 0;  // a column of the product: sums over the first or the last 8 tokens
    const std::uint32_t b0 = odd ? 0 : ones, b1 = odd ? ones : 0;
    float2 after = make_float2(0.0f, 0.0f);
    bool reach = true;
#pragma unroll
    for (int t = 0; t < kBlocks; ++t) {
      std::uint32_t a[4];
      float sums[4] = {};
      TensorCore80::load_a<Stored::k_outer>(a, g_tile, t, thread);
      TensorCore80::multiply(sums, a, b0, b1);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[i] *= kLog2E;
        reach = reach && sums[i] >= -kBlockReach;
      }
      const float2 before = make_float2(after.x + sums[0], after.y + sums[2]);
      visit(t, factors_of<kSubnormal>(before.x, before.y));
      constexpr float longest = kSubnormal ? kLongestSubnormal : kLongestStep;
      if (t > 0) reach = reach && before.x >= -longest && before.y >= -longest;
      after = make_float2(sums[1], sums[3]);
    }
    visit(kBlocks, factors_of<kSubnormal>(after.x, after.y));
    return reach;
  }
  __device__ __forceinline__ void put_factor(int t, float2 of_rows, int thread) const {
    const int row = row_of_element(thread, 0);
    if (thread % 4 != 0) return;
    put_float(factor(t), row, of_rows.x);
    put_float(factor(t), row + 8, of_rows.y);
  }
  // Whether no channel falls by more than so many bits over the chunk: alike in every warp.
  __device__ __forceinline__ bool one_would_reach(float bits, int thread) const {
    float2 all = make_float2(1.0f, 1.0f);
#pragma unroll
    for (int t = 0; t <= kBlocks; ++t) {
      const float2 more = load_shared_float2(factor(t) + 8 * (thread % 32));
      all = make_float2(all.x * more.x, all.y * more.y);
    }
    const float least = ptx::exp2(-bits);
    return __all_sync(0xffffffffu, all.x >= least && all.y >= least) != 0;
  }
};

// Running sums of gates over the chunk, where the warp's accumulator has them, become the sums from its block's anchor.
__device__ __forceinline__ void sums_from_anchor(Accumulator& sums, int thread) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {  // lanes 28 .. 31 have token 7 of the block
    const float first = __shfl_sync(0xffffffffu, sums[4 * j], 28 + thread % 4),
                second = __shfl_sync(0xffffffffu, sums[4 * j + 1], 28 + thread % 4);
    sums[4 * j] -= first;
    sums[4 * j + 1] -= second;
    sums[4 * j + 2] -= first;
    sums[4 * j + 3] -= second;
  }
}
// Whether these, natural logarithms, are in reach, which NaN and -inf are not.
__device__ __forceinline__ bool anchors_reach(const Accumulator& sums) {
  constexpr float reach = kBlockReach / kLog2E;
  bool reaches = true;
#pragma unroll
  for (int i = 0; i < 32; ++i) reaches = reaches && fabsf(sums[i]) <= reach;
  return reaches;
}

// ---- from anchor to anchor ----
// kAnchors: of blocks, each a k-step of a product, or of half blocks (half_blocks.cuh), each half of one.

// As scale_columns_at, with a vector for each of this thread's rows, or the same one.
template <bool kAlike>
__device__ __forceinline__ void scale_columns_by_rows(Accumulator& a, std::uint32_t first, std::uint32_t second) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 x = load_shared_float2(first + 32 * j), y = kAlike ? x : load_shared_float2(second + 32 * j);
    a[4 * j] *= x.x;
    a[4 * j + 1] *= x.y;
    a[4 * j + 2] *= y.x;
    a[4 * j + 3] *= y.y;
  }
}

// This thread's rows that belong to block t and later ones (kFromHere), or to earlier ones, times factor t. Of half
// blocks its two rows belong to one each.
template <int kAnchors, int t, bool kFromHere>
__device__ __forceinline__ void scale_rows_of_blocks(Accumulator& a, const Anchors& anchors, int thread) {
  const auto vector = [&](int block) {
    return anchors.factor_if(kFromHere ? block >= t : block < t, t) + 8 * (thread % 4);
  };
  constexpr int kEach = kAnchors / kBlocks;  // of a warp
  const int own = thread / 32 * kEach;
  scale_columns_by_rows<t % kEach == 0>(a, vector(own), vector(own + kEach - 1));
}
// d += the step of block t of pairs times a tile's rows.
template <class Core, int kAnchors, int t>
__device__ __forceinline__ void add_step(Accumulator& d, std::uint32_t (&pairs)[16], std::uint32_t tile) {
  Core::begin(pairs, d);
  if constexpr (kAnchors == kBlocks) {
    Core::template steps<Stored::k_outer, t, 1>(d, pairs, tile);
  } else {
    Core::template half_step<Stored::k_outer, t>(d, pairs, tile);
  }
  Core::finish(d);
}
// step(t) for each block, as a constant, or back from the last one.
template <int kAnchors, bool kBack, class Step>
__device__ __forceinline__ void for_each_block(Step step) {
  const auto all = [&]<int... i>(std::integer_sequence<int, i...>) {
    (step(std::integral_constant < int, kBack ? kAnchors - 1 - i : i > {}), ...);
  };
  all(std::make_integer_sequence<int, kAnchors>());
}

// Scores [key][query] of a chunk whose tiles hold k and scale q from their anchors, above the diagonal as it may be;
// and `keys`: the warp's rows of k from the last anchor.
template <class Core, int kAnchors>
__device__ __forceinline__ void anchored_scores(Accumulator& scores, std::uint32_t (&keys)[16], std::uint32_t q_tile,
                                                std::uint32_t k_tile, const Anchors& anchors, int thread) {
  Accumulator k;
  load_operand<Stored::k_inner>(keys, k_tile, thread);
  unpack_operand(k, keys);
  clear(scores);
  for_each_block<kAnchors, false>([&](auto of_block) {
    constexpr int t = decltype(of_block)::value;
    Core::begin(keys, scores);
    if constexpr (kAnchors == kBlocks) {
      Core::template sixteen_columns<2 * t>(reinterpret_cast<float(&)[8]>(scores[8 * t]), keys, q_tile);
    } else {
      Core::template eight_columns<t>(reinterpret_cast<float(&)[4]>(scores[4 * t]), keys, q_tile);
    }
    Core::finish(scores);
    if constexpr (t + 1 < kAnchors) {
      scale_rows_of_blocks<kAnchors, t + 1, false>(k, anchors, thread);
      to_operand(keys, k);
    }
  });
}

// d, rows queries: what they have from beyond the chunk, from the chunk's start, gets the pairs with keys and ends in
// its rows' anchors' units. pairs: [query][key], zero above the diagonal; k_tile: k from its anchors.
template <class Core, int kAnchors>
__device__ __forceinline__ void add_anchored_keys(Accumulator& d, std::uint32_t (&pairs)[16], std::uint32_t k_tile,
                                                  const Anchors& anchors, int thread) {
  for_each_block<kAnchors, false>([&](auto of_block) {
    constexpr int t = decltype(of_block)::value;
    scale_rows_of_blocks<kAnchors, t, true>(d, anchors, thread);
    add_step<Core, kAnchors, t>(d, pairs, k_tile);
  });
}

// d, rows keys: from the last anchor, likewise with queries.
template <class Core, int kAnchors>
__device__ __forceinline__ void add_anchored_queries(Accumulator& d, std::uint32_t (&pairs)[16], std::uint32_t q_tile,
                                                     const Anchors& anchors, int thread) {
  for_each_block<kAnchors, true>([&](auto of_block) {
    constexpr int t = decltype(of_block)::value;
    add_step<Core, kAnchors, t>(d, pairs, q_tile);
    if constexpr (t > 0) scale_rows_of_blocks<kAnchors, t, false>(d, anchors, thread);
  });
}

// h, rows channels: from the last anchor; the outer products of queries (q_tile, from their anchors) and the other
// tile's rows come to it, and it ends at the chunk's start.
template <class Core, int kAnchors>
__device__ __forceinline__ void add_anchored_outer(Accumulator& h, std::uint32_t q_tile, std::uint32_t other_tile,
                                                   const Anchors& anchors, int thread) {
  std::uint32_t queries[16];  // of half blocks: a half has the other one's registers 0
  if constexpr (kAnchors != kBlocks) load_operand<Stored::k_outer>(queries, q_tile, thread);
  for_each_block<kAnchors, true>([&](auto of_block) {
    constexpr int t = decltype(of_block)::value;
    if constexpr (kAnchors == kBlocks) {
      Core::begin(h);
      Core::template steps<Stored::k_outer, Stored::k_outer, t, 1>(h, q_tile, other_tile);
      Core::finish(h);
    } else {
      add_step<Core, kAnchors, t>(h, queries, other_tile);
    }
    const float2 of_rows = anchors.of_rows(t, thread);
    scale_rows(h, of_rows.x, of_rows.y);
  });
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
