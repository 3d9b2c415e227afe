// The rung of tiles/half_blocks.cuh in the one-pass forward of narrow heads on Hopper, as fused_anchors.cuh has that of
// tiles/anchors.cuh; but exponents are found a k-step at a time, where the gates lie, for there are no registers.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/forward/fused_anchors.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/tiles/half_blocks.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

using HalfBlockFactors = AnchorFactorsOf<kHalfBlocks>;

// q from its anchors to `queries` and k in place; factors to the tile of q. All threads of the group have done so
// behind a barrier. The state's first factor has what gates are below the least.
template <class Core>
__device__ __forceinline__ void gate_half_blocks(std::uint32_t (&queries)[16], std::uint32_t q_tile,
                                                 std::uint32_t k_tile, std::uint32_t g_tile) {
  const HalfBlockSums sums(g_tile, fresh_shuffled());
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    float b[8];
    std::uint32_t x[4], keys[4];
    __syncwarp();  // or ptxas loads ahead what it has no registers for
    const int thread = fresh_shuffled();
    sums.find(b, k16, thread);
    gate_step(x, keys, q_tile, k_tile, b, kLog2E, k16, thread);
#pragma unroll
    for (int i = 0; i < 4; ++i) queries[4 * k16 + i] = x[i];
    Core::put_fragment(k_tile, keys, k16, thread);
  }
  __syncwarp();  // the queries have been read
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
  const auto two_steps = [&](auto of_block) {
    constexpr int block = decltype(of_block)::value, t = 2 * (kBlocks - 1 - block);
    float scores[8];
    TensorCore80::load_a<Stored::k_outer>(keys, k_tile, kBlocks - 1 - block, fresh_shuffled());
    step(std::integral_constant<int, t>{}, reinterpret_cast<float(&)[4]>(scores[4]));
    step(std::integral_constant<int, t + 1>{}, reinterpret_cast<float(&)[4]>(scores[0]));
    select_block(pairs, scores, block, false, fresh_shuffled());
  };
  two_steps(std::integral_constant<int, 3>{});
  two_steps(std::integral_constant<int, 2>{});
  two_steps(std::integral_constant<int, 1>{});
  two_steps(std::integral_constant<int, 0>{});
  vectors.finish<Core>(o, h, queries, pairs, v_tile, h_tile);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
