// The rungs of tiles/anchors.cuh and tiles/half_blocks.cuh in the one-pass forward of narrow heads on Hopper. What goes
// from anchor to anchor are the queries, an operand in registers, between one block of keys and the one before it, and
// the state, between the k-steps of its product. The state stays in registers, and no operand needs a second tile.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/forward/gates.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/tiles/half_blocks.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// The factors of Anchors, and ones, in the queries' tile: those that a warp finds in its own rows. For the state they
// are f32; for queries, which are rounded at each anchor, since f32 would take 32 registers more, sums of two bf16
// numbers.
template <int kAnchors>
struct AnchorFactorsOf {
  static constexpr int kOnes = kAnchors, kOfState = kOnes + 1;
  std::uint32_t tile;

  __device__ __forceinline__ std::uint32_t place(int t, int channel) const {
    return tile + channel / 16 * (16 * 128) + 4 * (16 * t + channel % 16);
  }
  __device__ __forceinline__ void put_for_query(int t, int channel, float factor) const {
    const std::uint32_t high = ptx::pack_bf16(factor, 0.0f);
    const std::uint32_t both = ptx::pack_bf16(factor, factor - ptx::unpack_bf16(high).x);
    store_shared_4(place(t, channel), both);
  }
  // Of this thread's rows of the state, which are channels.
  __device__ __forceinline__ void put(int t, float2 of_rows, int thread) const {
    if (thread % 4 != 0) return;
    const int row = row_of_element(thread, 0);
    if (t < kAnchors) {
      put_for_query(t, row, of_rows.x);
      put_for_query(t, row + 8, of_rows.y);
    }
    put_for_state(t, of_rows, thread);
  }
  __device__ __forceinline__ void put_for_state(int t, float2 of_rows, int thread) const {
    if (thread % 4 != 0) return;
    const int row = row_of_element(thread, 0);
    put_float(place(kOfState + t, row), 0, of_rows.x);
    put_float(place(kOfState + t, row), 8, of_rows.y);
  }
  // Of a channel and the next one.
  __device__ __forceinline__ float2 of_queries(int t, int channel) const {
    const uint2 parts = load_shared_uint2(place(t, channel));
    const float2 first = ptx::unpack_bf16(parts.x), second = ptx::unpack_bf16(parts.y);
    return make_float2(first.x + first.y, second.x + second.y);
  }
  // Of this thread's rows of the state.
  __device__ __forceinline__ float2 of_rows(int t, int thread) const {
    const std::uint32_t at = place(kOfState + t, row_of_element(thread, 0));
    return make_float2(float_at(at), float_at(at, 8));
  }
  __device__ __forceinline__ void scale_state(Accumulator& h, int t) const {
    const float2 factors = of_rows(t, fresh_shuffled());
    scale_rows(h, factors.x, factors.y);
  }
  // Behind the last step: o of the chunk without its scale, and the state's last factor.
  template <class Core>
  __device__ __forceinline__ void finish(Accumulator& o, Accumulator& h, std::uint32_t (&queries)[16],
                                         std::uint32_t (&pairs)[16], std::uint32_t v_tile, std::uint32_t h_tile) const {
    Core::begin(queries, pairs);
    Core::template product<Stored::k_outer, true>(o, queries, h_tile, 0);
    Core::template product<Stored::k_outer>(o, pairs, v_tile, 0);
    Core::commit();
    scale_state(h, kAnchors);
    Core::template wait<0>(o);
  }
  __device__ __forceinline__ void put_ones(int thread) const {
    if (thread % 32 < 16) put_for_query(kOnes, thread / 32 * 16 + thread % 32, 1.0f);
  }
  // By vector t, or of this thread's two rows each by its own.
  template <bool kAlike>
  __device__ __forceinline__ void scale_queries(std::uint32_t (&queries)[16], int t, int of_second, int thread) const {
    const std::uint32_t at = place(t, 2 * (thread % 4)), at_second = place(of_second, 2 * (thread % 4));
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int offset = j / 2 * (16 * 128) + j % 2 * 32;
      const auto scale = [&](std::uint32_t& x, uint2 factor) {
        const std::uint32_t high = __byte_perm(factor.x, factor.y, 0x5410),
                            low = __byte_perm(factor.x, factor.y, 0x7632);
        x = times_split(x, high, low);
      };
      const uint2 factor = load_shared_uint2(at + offset);
      scale(queries[2 * j], factor);
      scale(queries[2 * j + 1], kAlike ? factor : load_shared_uint2(at_second + offset));
    }
  }
};

// q from its anchors to `queries`, and k in place. sums(k16, thread): natural logarithms of what a k-step's elements of
// an accumulator fall by from their anchor.
template <class Core, class Sums>
__device__ __forceinline__ void gate_from_anchors(std::uint32_t (&queries)[16], std::uint32_t q_tile,
                                                  std::uint32_t k_tile, const Sums& sums) {
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    std::uint32_t x[4], keys[4];
    __syncwarp();  // or ptxas loads ahead what it has no registers for
    const int thread = fresh_shuffled();
    gate_step(x, keys, q_tile, k_tile, sums(k16, thread), kLog2E, k16, thread);
#pragma unroll
    for (int i = 0; i < 4; ++i) queries[4 * k16 + i] = x[i];
    Core::put_fragment(k_tile, keys, k16, thread);
  }
  __syncwarp();  // the queries have been read
}

// ---- anchors of blocks ----

using AnchorFactors = AnchorFactorsOf<kBlocks>;

// Natural logarithms of what the elements of a warp's accumulator fall by from their block's anchor, from a tile of
// gates: an operand of ones after the anchor and minus ones before it, times the warp's own 16 rows.
__device__ __forceinline__ void sum_from_anchor(Accumulator& sums, std::uint32_t g_tile, int thread) {
  constexpr std::uint32_t ones = 0x3f803f80, low = 0x0000ffff, high = 0xffff0000, sign = 0x80008000;
  const int warp = thread / 32, row = thread % 32 / 4, column = 2 * (thread % 4);
  const std::uint32_t before = (ones | sign) & ((column > row ? low : 0) | (column + 1 > row ? high : 0)),
                      after = ones & ((column <= row ? low : 0) | (column + 1 <= row ? high : 0));
  const std::uint32_t operand[4] = {before, 0, 0, after};
  clear(sums);
  TensorCore80::add_step<Stored::k_outer>(sums, operand, g_tile, warp, thread);
}

// What a chunk has in registers between its gates and its products.
struct AnchoredChunk {
  Accumulator sums;             // from the blocks' anchors
  float2 factors[kBlocks + 1];  // Anchors, of this thread's rows of the state

  // By a group. Whether anchors serve, as far as this thread's rows of the state, which are channels, say.
  __device__ __forceinline__ bool take(std::uint32_t g_tile) {
    const bool reach =
        Anchors::find_factors<false>(g_tile, fresh_thread(), [&](int t, float2 of_rows) { factors[t] = of_rows; });
    __syncwarp();
    sum_from_anchor(sums, g_tile, fresh_shuffled());
    return reach;
  }

  // Behind a barrier that all have taken theirs by; v is there. o of the chunk without its scale, and the state after
  // it. The tile of k is lost, and that of q is room for factors until a barrier. Whether one anchor would have served.
  template <class Core>
  __device__ __forceinline__ bool products(Accumulator& o, Accumulator& h, std::uint32_t q_tile, std::uint32_t k_tile,
                                           std::uint32_t v_tile, std::uint32_t h_tile) {
    const AnchorFactors vectors{q_tile};
    std::uint32_t queries[16];
    gate_from_anchors<Core>(queries, q_tile, k_tile, [&](int k16, int) { return sums + 8 * k16; });
    float2 all = make_float2(1.0f, 1.0f);
#pragma unroll
    for (int t = 0; t <= kBlocks; ++t) {
      vectors.put(t, factors[t], fresh_thread());
      all = make_float2(all.x * factors[t].x, all.y * factors[t].y);
    }
    vectors.put_ones(fresh_thread());
    Core::publish();
    const float least = ptx::exp2(-kRange);
    const bool one_reaches = !sync_fresh_group_or(!(all.x >= least && all.y >= least));

    std::uint32_t pairs[16];
    // The outer products of block t's keys, and the scores with those of block 3 - t.
    for_each_block<kBlocks, false>([&](auto of_step) {
      constexpr int t = decltype(of_step)::value, block = kBlocks - 1 - t;
      float scores[8];
      vectors.scale_state(h, t);
      Core::begin(queries, h);
      Core::template steps<Stored::k_outer, Stored::k_outer, t, 1>(h, k_tile, v_tile);
      Core::template sixteen_columns<2 * block>(scores, queries, k_tile);
      Core::finish(h, scores);
      const int thread = fresh_shuffled();
      select_block(pairs, scores, block, false, thread);
      const int vector = thread / 32 >= block ? block : AnchorFactors::kOnes;
      vectors.scale_queries<true>(queries, vector, vector, thread);
    });
    vectors.finish<Core>(o, h, queries, pairs, v_tile, h_tile);
    return one_reaches;
  }
};

// ---- of half blocks: exponents are found a k-step at a time, where the gates lie, for there are no registers ----

using HalfBlockFactors = AnchorFactorsOf<kHalfBlocks>;

// q from its anchors to `queries` and k in place; factors to the tile of q. All threads of the group have done so
// behind a barrier. The state's first factor has what gates are below the least.
template <class Core>
__device__ __forceinline__ void gate_half_blocks(std::uint32_t (&queries)[16], std::uint32_t q_tile,
                                                 std::uint32_t k_tile, std::uint32_t g_tile) {
  const HalfBlockSums sums(g_tile, fresh_shuffled());
  float of_step[8];
  gate_from_anchors<Core>(queries, q_tile, k_tile, [&](int k16, int thread) {
    sums.find(of_step, k16, thread);
    return of_step;
  });
  const HalfBlockFactors vectors{q_tile};
  float2 first = make_float2(1.0f, 1.0f);
  const float2 below = find_half_block_factors<true>(g_tile, fresh_shuffled(), [&](int t, float2 of_rows) {
    if (t == 0) first = of_rows;
    vectors.put(t, of_rows, fresh_shuffled());
  });
  vectors.put_for_state(0, make_float2(first.x * below.x, first.y * below.y), fresh_shuffled());
  vectors.put_ones(fresh_shuffled());
}

// What the chunk on this rung is for the next one.
__device__ __forceinline__ NextRung rung_of_half_blocks(std::uint32_t q_tile) {
  const HalfBlockFactors vectors{q_tile};
  return rung_of_half_blocks(kRange, [&](int t) { return vectors.of_queries(t, fresh_shuffled() % 32 * 2); });
}

// Behind the barrier; v is there. o of the chunk without its scale, and the state after it.
template <class Core>
__device__ __forceinline__ void half_block_products(Accumulator& o, Accumulator& h, std::uint32_t (&queries)[16],
                                                    std::uint32_t q_tile, std::uint32_t k_tile, std::uint32_t v_tile,
                                                    std::uint32_t h_tile) {
  const HalfBlockFactors vectors{q_tile};
  std::uint32_t pairs[16], keys[4];
  // Step t: the outer products of half block t's keys, and the scores with those of half block 7 - t.
  const auto step = [&](auto of_step, float(&scores)[4]) {
    constexpr int t = decltype(of_step)::value, block = kHalfBlocks - 1 - t;
    vectors.scale_state(h, t);
    Core::begin(queries, keys, h);
    Core::template half_step<Stored::k_outer, t>(h, keys, v_tile);
    Core::template eight_columns<block>(scores, queries, k_tile);
    Core::finish(h, scores);
    const int thread = fresh_shuffled(), own = thread / 32 * 2;
    const auto vector = [&](bool takes_part) { return takes_part ? block : HalfBlockFactors::kOnes; };
    vectors.template scale_queries<block % 2 == 0>(queries, vector(own >= block), vector(own + 1 >= block), thread);
  };
  for_each_block<kBlocks, true>([&](auto of_block) {
    constexpr int block = decltype(of_block)::value, t = 2 * (kBlocks - 1 - block);
    float scores[8];
    TensorCore80::load_a<Stored::k_outer>(keys, k_tile, kBlocks - 1 - block, fresh_shuffled());
    step(std::integral_constant<int, t>{}, reinterpret_cast<float(&)[4]>(scores[4]));
    step(std::integral_constant<int, t + 1>{}, reinterpret_cast<float(&)[4]>(scores[0]));
    select_block(pairs, scores, block, false, fresh_shuffled());
  });
  vectors.finish<Core>(o, h, queries, pairs, v_tile, h_tile);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
