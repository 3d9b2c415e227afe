// A chunk on the rungs of tiles/anchors.cuh and tiles/half_blocks.cuh in backward/channels.cuh.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/backward/channels_view.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// q~ and k~ in place, factors to their vectors and dh^ to its tile; whether no gate that this thread has seen is NaN.
template <class Core, GatesAs kGates>
__device__ __forceinline__ bool gate_half_blocks(const ChannelsView<Core, kGates>& view, int index,
                                                 const Accumulator& held) {
  using Layout = ChannelsShared;
  const bool first_group = view.first_group;
  const std::uint32_t stage = view.stage_of(index);
  if (!first_group) {
    const Anchors to = view.anchors();
    float2 last = make_float2(1.0f, 1.0f);
    const float2 below = find_half_block_factors<false>(stage + Layout::g, fresh_thread(), [&](int t, float2 of_rows) {
      if (t < kHalfBlocks) to.put_factor(t, of_rows, fresh_thread());
      last = of_rows;
    });
    view.put_decayed(held, last, fresh_thread());
    to.put_factor(kHalfBlocks, make_float2(last.x * below.x, last.y * below.y), fresh_thread());
  }
  const int thread = fresh_shuffled();
  const std::uint32_t own_tile = stage + (first_group ? Layout::q : Layout::k);
  const HalfBlockSums sums(stage + Layout::g, thread);
  const Exponent of_sums = view.exponent();
  bool are_numbers = true;
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    float b[8];
    __syncwarp();
    sums.find(b, k16, thread);
#pragma unroll
    for (int i = 0; i < 8; ++i) are_numbers = are_numbers && b[i] == b[i];
    view.gate_step(own_tile, k16, b, of_sums, thread);
  }
  return are_numbers;
}

// What the first token's gates have been held back by, of this thread's rows, which are channels; and, of gates in f32,
// what they have been rounded by, for the gradient of the first state is made of these few alone.
template <class Core, GatesAs kGates>
__device__ __forceinline__ float2 of_first_gates(const ChannelsView<Core, kGates>& view, int index, int thread) {
  const std::uint32_t tile = view.stage_of(index) + ChannelsShared::g;
  const int row = row_of_element(thread, 0);
  const auto factor = [&](int channel) {
    const float2 pair = ptx::unpack_bf16(load_shared_4(tile + tile_piece(0, channel / 8) + channel % 8 / 2 * 4));
    const float rounded = channel % 2 == 0 ? pair.x : pair.y;
    float gate = rounded;
    if constexpr (view.kInF32) {
      if (channel < view.p.key_dim) gate = reinterpret_cast<const float*>(view.own_rows(index, Places::g))[channel];
    }
    return ptx::exp2((gate - fmaxf(rounded, kLeastGate)) * kLog2E);
  };
  return make_float2(factor(row), factor(row + 8));
}

// The products of a chunk (products_of_chunk) from anchor to anchor between the k-steps; kBlocks anchors, or
// kHalfBlocks. With these what tokens have with themselves is left to leave_half_blocks, and `others` are for it.
template <int kAnchors, class Core, GatesAs kGates>
__device__ __forceinline__ void anchored_products(const ChannelsView<Core, kGates>& view, int index, Accumulator& d,
                                                  Accumulator& held, std::uint32_t (&others)[16]) {
  using Layout = ChannelsShared;
  constexpr Stored k_inner = Stored::k_inner, k_outer = Stored::k_outer;
  constexpr bool kHalf = kAnchors == kHalfBlocks;
  const Anchors anchors = view.anchors();
  const std::uint32_t stage = view.stage_of(index), x_tile = view.x_tile();
  const std::uint32_t q = stage + Layout::q, k = stage + Layout::k, d_o = stage + Layout::d_o, v = stage + Layout::v,
                      h = stage + Layout::h;
  if constexpr (kHalf) {
    view.put_rung(rung_of_half_blocks(kSteep, [&](int t) {
                    return load_shared_float2(anchors.factor(t) + 8 * (fresh_thread() % 32));
                  }).rung);
  } else {
    view.put_rung(anchors.one_would_reach(kSteep, fresh_thread()) ? Rung::one_anchor : Rung::anchors);
  }
  view.put_gates_held(kHalf);
  std::uint32_t pairs[16];
  if (view.first_group) {
    std::uint32_t scores[16], keys[16];
    {
      Accumulator s;  // [key][query]
      anchored_scores<Core, kAnchors>(s, keys, q, k, anchors, fresh_shuffled());
      select_pairs<true>(scores, s, fresh_shuffled());
    }
    Core::begin(scores, keys);
    Core::template product<k_outer, true>(held, keys, x_tile, fresh_thread());
    Core::template product<k_outer>(held, scores, d_o, fresh_thread());
    Core::finish(held);
    {
      Accumulator a;  // [query][key]
      Core::begin();
      Core::template product<k_inner, k_inner, true>(a, d_o, v, fresh_thread());
      Core::finish(a);
      select_pairs<false>(pairs, a, fresh_shuffled());
    }
    if constexpr (kHalf) take_diagonal(view.diagonal(), pairs, fresh_shuffled());
    Core::begin();
    Core::template product<k_inner, k_inner, true>(d, d_o, h, fresh_thread());
    Core::finish(d);
    add_anchored_keys<Core, kAnchors>(d, pairs, k, anchors, fresh_shuffled());
    if constexpr (kHalf) {
      load_operand<k_inner>(others, view.stage_of(view.index_there()) + Layout::k, fresh_shuffled());
    }
  } else {
    {
      const float2 of_rows = anchors.of_rows(kAnchors, fresh_shuffled());
      scale_rows(held, of_rows.x, of_rows.y);
    }
    add_anchored_outer<Core, kAnchors>(held, q, d_o, anchors, fresh_shuffled());
    view.put_beyond(dot_rows(h, held, fresh_shuffled()));
    if constexpr (kHalf) {
      const float2 first = of_first_gates(view, view.index_there(), fresh_shuffled());
      scale_rows(held, first.x, first.y);
    }
    {
      Accumulator a;  // [key][query]
      Core::begin();
      Core::template product<k_inner, k_inner, true>(a, v, d_o, fresh_thread());
      Core::finish(a);
      select_pairs<true>(pairs, a, fresh_shuffled());
    }
    if constexpr (kHalf) take_diagonal(view.diagonal(), pairs, fresh_shuffled());
    Core::begin();
    Core::template product<k_inner, k_inner, true>(d, v, x_tile, fresh_thread());
    Core::finish(d);
    add_anchored_queries<Core, kAnchors>(d, pairs, q, anchors, fresh_shuffled());
    if constexpr (kHalf) {
      load_operand<k_inner>(others, view.stage_of(view.index_there()) + Layout::q, fresh_shuffled());
    }
  }
}

// E to its tiles, and dq or dk from its rows' units; what tokens have with themselves, `others` (k' or q' of this
// warp's rows) times what take_diagonal has put, comes to it in between.
template <class Core, GatesAs kGates>
__device__ __forceinline__ void leave_half_blocks(const ChannelsView<Core, kGates>& view, int index, Accumulator& d,
                                                  const std::uint32_t (&others)[16]) {
  using Layout = ChannelsShared;
  const int thread = fresh_shuffled(), row = row_of_element(thread, 0);
  const std::uint32_t stage = view.stage_of(index), group = view.first_group ? 0 : kTileBytes;
  const HalfBlockSums sums(stage + Layout::g, thread);
  const Exponent of_sums = view.exponent();
  put_products<Core>(stage + Layout::d_o + group, stage + Layout::q + group, d, thread);
  const float of_row = float_at(view.diagonal(), row), of_next = float_at(view.diagonal(), row + 8);
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    float b[8];
    __syncwarp();
    sums.find(b, k16, thread);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 other = ptx::unpack_bf16(others[4 * k16 + i]);
      const float own = i & 1 ? of_next : of_row;
      const int at = 8 * k16 + 2 * i;
      d[at] = fmaf(own, other.x, d[at]) * ptx::exp2(of_sums(b[2 * i]));
      d[at + 1] = fmaf(own, other.y, d[at + 1]) * ptx::exp2(of_sums(b[2 * i + 1]));
    }
  }
  if (view.negated()) scale_rows(d, -1.0f, -1.0f);
  view.store_rows(index, d);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
