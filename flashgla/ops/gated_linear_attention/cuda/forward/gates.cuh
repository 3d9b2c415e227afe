// Gates of a 64x64 tile (64 tokens, 64 key channels), and the stability ladder of the scores
//     P_ij = sum_k q_ik k_jk 2^(G_ik - G_jk), i >= j,   G the running sum of the gates, base 2, over the chunk.
//
// One anchor, the chunk's start, while no channel of 64 falls by more than kRange bits: q 2^G times k 2^-G, a plain
// product. Entries above the diagonal may be as large as 2^kRange; they are selected away. Else by blocks of 16 tokens
// (tiles/ladder.cuh), exact for any gates. Decided for a chunk and 64 channels, from the data.
#pragma once

#include <type_traits>

#include "flashgla/ops/gated_linear_attention/cuda/launch.h"
#include "flashgla/ops/gated_linear_attention/cuda/tiles/ladder.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/tiles/logits.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// Bits a channel may fall within one anchor's reach: 2^60 q.k stays far from overflow in f32 and bf16, and the running
// sum's rounding, 60 * 2^-24 * 8, far below bf16's.
constexpr float kRange = 60.0f;

// Whether one anchor reaches, by sums of a lane's two channels, which all warps have alike.
__device__ __forceinline__ bool one_anchor_reaches(float2 sums) {
  return __all_sync(0xffffffffu, sums.x >= -kRange && sums.y >= -kRange) != 0;
}

// f<GatesAs>() with how gates come in a launch of preparation: logits as such, none as one a token.
template <class Core, class F>
void with_gates_as(const Params& p, F f) {
  if constexpr (std::is_same_v<Core, TensorCore90>) {
    if (p.gate == GateKind::key && p.logit_scale != 0.0f) return f.template operator()<GatesAs::logits>();
  }
  with_gates_of<false>(
      p, [&]<GatesAs gates>() { f.template operator()<gates == GatesAs::none ? GatesAs::tokens : gates>(); });
}

// Running sums of one gate a token where an accumulator has its elements. gates: 64 floats.
__device__ __forceinline__ void sum_tokens(Accumulator& sums, std::uint32_t gates, int thread) {
  const float2 of_rows = token_sums(gates, thread);
#pragma unroll
  for (int i = 0; i < 32; ++i) sums[i] = i & 2 ? of_rows.y : of_rows.x;
}

// Two neighbours of q times 2^first and 2^second, and those of k times their inverses.
__device__ __forceinline__ void gate_two(std::uint32_t& q, std::uint32_t& k, float first, float second) {
  const float2 query = ptx::unpack_bf16(q), key = ptx::unpack_bf16(k);
  q = ptx::pack_bf16(query.x * ptx::exp2(first), query.y * ptx::exp2(second));
  k = ptx::pack_bf16(key.x * ptx::exp2(-first), key.y * ptx::exp2(-second));
}
// Of k-step k16 q 2^G and k 2^-G, as fragments. sums: the k-step's elements of an accumulator that has G, times
// to_base_2 to base 2.
__device__ __forceinline__ void gate_step(std::uint32_t (&q)[4], std::uint32_t (&k)[4], std::uint32_t q_tile,
                                          std::uint32_t k_tile, const float* sums, float to_base_2, int k16,
                                          int thread) {
  TensorCore80::load_a<Stored::k_inner>(q, q_tile, k16, thread);
  TensorCore80::load_a<Stored::k_inner>(k, k_tile, k16, thread);
#pragma unroll
  for (int i = 0; i < 4; ++i) gate_two(q[i], k[i], sums[2 * i] * to_base_2, sums[2 * i + 1] * to_base_2);
}
// Of all, in place, each warp its own rows.
template <class Core>
__device__ __forceinline__ void gate_by_sums(std::uint32_t q_tile, std::uint32_t k_tile, const Accumulator& sums,
                                             float to_base_2, int thread) {
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    std::uint32_t x[4], y[4];
    gate_step(x, y, q_tile, k_tile, sums + 8 * k16, to_base_2, k16, thread);
    Core::put_fragment(q_tile, x, k16, thread);
    Core::put_fragment(k_tile, y, k16, thread);
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
