// A chunk out of the reach of one anchor, and of anchors on wgmma, in backward/channels.cuh: by blocks of 16 tokens
// (tiles/ladder.cuh), a warp each; those that are not near by halving.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/backward/channels_view.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

constexpr int kOuterFactor = kBlocks;  // after put_factors: from the rows' anchor to the chunk's start (keys: its end)

// 32 floats or, as operands, 16 registers of each of the block's threads in shared memory, where local memory would go
// to the L2.
struct Beside {
  std::uint32_t own;  // this thread's first word
  __device__ __forceinline__ std::uint32_t word(int i) const { return own + 4 * kFusedThreads * i; }
  __device__ __forceinline__ void get(int k16, float (&x)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = float_at(word(8 * k16 + i));
  }
  __device__ __forceinline__ void put_operand(const std::uint32_t (&x)[16]) const {
#pragma unroll
    for (int i = 0; i < 16; ++i) store_shared_4(word(i), x[i]);
  }
  // As operand_of.
  __device__ __forceinline__ void operator()(std::uint32_t (&x)[4], int k16) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = load_shared_4(word(4 * k16 + i));
  }
};
template <bool kAdd>
__device__ __forceinline__ void add_eight(const Beside& e, int k16, const float (&more)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const std::uint32_t at = e.word(8 * k16 + i);
    put_float(at, 0, (kAdd ? float_at(at) : 0.0f) + more[i]);
  }
}

// What the warp's queries add to the state before the chunk times its gradient: sum_i q'_i d_i times the factor in
// `place`, a vector of the warp's own, which is written over. d: what dq has from beyond the chunk; q_tile: q'. dg_t
// takes q_i dq_i of earlier tokens away from this sum again, so the same rounded q' and the same d are in both: with
// gates that are strong hardly anything else is left.
__device__ __forceinline__ void sum_queries(std::uint32_t place, const Accumulator& d, std::uint32_t q_tile,
                                            int thread) {
  std::uint32_t x[16];
  load_operand<Stored::k_inner>(x, q_tile, thread);
  const int lane = thread % 32;
  const float2 sum = sum_over_rows(d, lane, two_of_operand(x)), factor = load_shared_float2(place + 8 * lane);
  store_shared_float2(place + 8 * lane, make_float2(sum.x * factor.x, sum.y * factor.y));
}

// The scores of the warp's queries, times scale, as an operand [query][key], but those inside a block that is not near.
// queries: q as loaded; exponents: exponents_from_anchor; keys_tile: k'; room: put_factors.
template <class Queries>
__device__ __forceinline__ void find_scores(std::uint32_t (&operand)[16], Queries queries, const Accumulator& exponents,
                                            std::uint32_t keys_tile, std::uint32_t room, bool near, float scale,
                                            int thread) {
  Accumulator gated_queries, scores;
  clear(scores);
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    std::uint32_t q[4];
    queries(q, k16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 8 * k16 + 2 * i;
      const float2 y = gated(q[i], scale, power_of(two_of(exponents)(k16, i)));
      gated_queries[at] = y.x;
      gated_queries[at + 1] = y.y;
    }
  }
  add_scores(scores, gated_queries, nullptr, keys_tile, room, near);
  select_pairs<false>(operand, scores, thread);
}

// The rung of the chunk before, from what blocks have told each other in `room`.
template <class Core>
__device__ __forceinline__ Rung rung_after_blocks(std::uint32_t room, const BlockSums& blocks) {
  const float2 all = sum_of_blocks(blocks);
  if (__all_sync(0xffffffffu, all.x >= -kSteep && all.y >= -kSteep) != 0) return Rung::one_anchor;
  if (!std::is_same_v<Core, TensorCore90>) return Rung::blocks;
  return each_is_near(room) ? Rung::anchors : Rung::half_blocks;
}

// From q, k and g as loaded to dq or dk, E in its tiles, dv or dh, as after the other rungs but for dq's and dk's
// factors, which are in them. Returns the chunk's number.
template <class Core, GatesAs kGates>
__device__ __forceinline__ int chunk_by_blocks(const ChannelsView<Core, kGates>& view, Accumulator& d,
                                               Accumulator& held) {
  using Layout = ChannelsShared;
  constexpr Stored k_inner = Stored::k_inner, k_outer = Stored::k_outer;
  constexpr Loads kLoads = Loads::in_turn;
  const Params& p = view.p;
  const bool first_group = view.first_group;
  const std::uint32_t x_tile = view.x_tile();
  const auto stage = [&] { return view.stage_of(view.index_there()); };
  // Where blocks tell each other their sums; the tile of q' or k', and that of the other group.
  const auto room = [&] { return stage() + (first_group ? Layout::g : Layout::v); };
  const auto own_tile = [&] { return stage() + (first_group ? Layout::q : Layout::k); };
  const auto other_tile = [&] { return stage() + (first_group ? Layout::k : Layout::q); };
  const auto by_queries = [&](int warp) { return view.base + Layout::by_queries + 4 * kTile * warp; };

  // In the tiles of the chunk before, which is asked for in the end: scale q dq, or k dk; and k (q) where a block is
  // not near.
  const auto beside = [&](int words) {
    return Beside{view.stage_of(view.index_there() + 1) + 4 * (kFusedThreads * words + static_cast<int>(threadIdx.x))};
  };
  const auto e = [&] { return beside(0); };
  const auto others = [&] { return beside(32); };
  Local<std::uint32_t, 16> found_pairs, found_scores, outer;
  Local<float, 32> gradient;  // of the state, in the second group
  if (!first_group) {         // dh before its decay to its tile
    const int thread = thread_shuffled<Core>(fresh_thread());
    const float2 totals = sum_rows_of_tile(stage() + Layout::g, thread);
    put_rounded<Core>(x_tile, held, thread);
    scale_rows(held, ptx::exp2(totals.x * kLog2E), ptx::exp2(totals.y * kLog2E));
    gradient.put(held);
  }
  Core::publish();
  __syncthreads();
  Local<std::uint32_t, 16> own;  // q (k), this warp's rows
  Accumulator sums;
  bool near;
  {
    const std::uint32_t from = stage();
    std::uint32_t operand[16];
    {
      Accumulator a;
      Core::begin();
      Core::template product<k_inner, k_inner, true, kLoads>(a, from + (first_group ? Layout::d_o : Layout::v),
                                                             from + (first_group ? Layout::v : Layout::d_o),
                                                             thread_shuffled<Core>(fresh_thread()));
      Core::finish(a);
      select_pairs(operand, a, !first_group, fresh_thread());
      found_pairs.put(operand);
    }
    __syncwarp();
    const int thread = fresh_thread();
    load_operand<k_inner>(operand, from + (first_group ? Layout::q : Layout::k), thread);
    own.put(operand);
    sum_block(sums, from + Layout::g, thread);
    near = is_near(sums, thread % 32);
    if (!near) {
      load_operand<k_inner>(operand, from + (first_group ? Layout::k : Layout::q), thread);
      others().put_operand(operand);
    }
  }
  const auto find_beyond = [&] {  // dq's and dk's part from beyond the chunk
    const std::uint32_t from = stage();
    Core::begin();
    Core::template product<k_inner, k_inner, true, kLoads>(d, from + (first_group ? Layout::d_o : Layout::v),
                                                           first_group ? from + Layout::h : x_tile,
                                                           thread_shuffled<Core>(fresh_thread()));
    Core::finish(d);
  };
  if (!first_group) find_beyond();
  __syncthreads();  // gates, q, k and v have been read
  publish_block(room(), sums, near, fresh_thread());
  ptx::barrier(first_group ? 1 : 2, kGroupThreads);
  if (near) exponents_from_anchor(sums, room(), true, !first_group, fresh_thread());
  // Of the rows of q or k. Of a block that is not near sums stay as they are, alike in both groups.
  const auto exponents = [&](int thread) {
    const std::uint32_t total_at = block_total(room(), thread / 32);
    return [=, &sums](int k16, int i) {
      const float2 sum = two_of(sums)(k16, i);
      if (near || first_group) return sum;
      const float2 total = of_columns(total_at, k16, i, thread);
      return make_float2(total.x - sum.x, total.y - sum.y);
    };
  };
  {
    const int warp = fresh_thread() / 32, lane = fresh_thread() % 32;
    const float2 from_start = power_of(put_factors(room(), !first_group, warp, lane));
    store_shared_float2(block_factor(room(), warp, kOuterFactor) + 8 * lane, from_start);
    if (first_group) store_shared_float2(by_queries(warp) + 8 * lane, from_start);
    view.put_rung(rung_after_blocks<Core>(room(), read_blocks(room(), lane)));
  }
  __syncwarp();
  {
    const int thread = fresh_thread();
    const std::uint32_t factors = block_factor(room(), thread / 32, kOuterFactor);
    std::uint32_t loaded[16];
    own.get(loaded);
    put_gated<Core>(own_tile(), loaded, first_group ? p.scale : 1.0f, thread, exponents(thread), [&](int i, float2 y) {
      const float2 more = of_columns(factors, i / 4, i % 4, thread);
      outer.x[i] = ptx::pack_bf16(y.x * more.x, y.y * more.y);
    });
  }
  __syncthreads();  // q' and k' are there: the groups go on by themselves
  if (first_group) {
    std::uint32_t operand[16];
    find_scores(operand, operand_of(own.x), sums, other_tile(), room(), near, p.scale, fresh_shuffled());
    found_scores.put(operand);
    find_beyond();
    sum_queries(by_queries(fresh_thread() / 32), d, own_tile(), fresh_shuffled());
  }
  {
    Beside sums_of_e = e();
    add_blocks(d, operand_of(found_pairs.x), other_tile(), room(), near, !first_group, fresh_shuffled());
    sum_products<false>(sums_of_e, 1.0f, d, own_tile(), fresh_shuffled());
    scale_by_powers(d, exponents(fresh_shuffled()));
  }
  Local<std::uint32_t, 4> inside;  // of a block that is not near, scores
  if (!near) {
    const Beside sums_of_e = e(), keys_or_queries = others();
    std::uint32_t block[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) block[i] = found_pairs.x[4 * (fresh_thread() / 32) + i];
    if (first_group) {
      add_halves<true, false>(d, d, sums_of_e, 1.0f, block, operand_of(own.x), keys_or_queries, sums, p.scale,
                              fresh_thread());
    } else {
      // The first group has more to do: the block's scores are found here for both.
      Local<float, 8> found;
#pragma unroll
      for (int i = 0; i < 8; ++i) found.x[i] = 0.0f;
      add_halves<false, true>(d, d, sums_of_e, 1.0f, block, keys_or_queries, operand_of(own.x), sums, p.scale,
                              fresh_shuffled(), &found);
      float scores[8];
      finish_levels(found.x, scores, p.scale, fresh_shuffled() % 32);
#pragma unroll
      for (int i = 0; i < 4; ++i) inside.x[i] = ptx::pack_bf16(scores[2 * i], scores[2 * i + 1]);
    }
  }
  __syncthreads();  // k', q' and the sums have been read
  {
    const int thread = fresh_thread();
    const std::uint32_t scores_tile = stage() + Layout::g;                 // [key][query]
    const bool is_far = !block_is_near(stage() + Layout::v, thread / 32);  // as above: nothing holds it
    if (first_group) {
#pragma unroll
      for (int k16 = 0; k16 < 4; ++k16) {
        if (is_far && k16 == thread / 32) continue;
        std::uint32_t r[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) r[i] = found_scores.x[4 * k16 + i];
        Core::put_fragment_transposed(scores_tile, r, k16, thread);
      }
    } else if (is_far) {
      std::uint32_t r[4];
      inside.get(r);
      Core::put_fragment_transposed(scores_tile, r, thread / 32, thread);
    }
    std::uint32_t operand[16];
    outer.get(operand);
    put_operand<Core>(own_tile(), operand, fresh_thread());
  }
  Core::publish();
  __syncthreads();
  if (first_group) {
    Core::begin();
    Core::template product<k_inner, k_outer, true, kLoads>(held, other_tile(), x_tile,
                                                           thread_shuffled<Core>(fresh_thread()));
    Core::template product<k_inner, k_outer, false, kLoads>(held, room(), stage() + Layout::d_o,
                                                            thread_shuffled<Core>(fresh_thread()));
    Core::finish(held);
    scale_rows(d, p.scale, p.scale);
  } else {
    gradient.get(held);
    view.put_beyond(dot_rows(stage() + Layout::h, held, fresh_thread()));
    Core::begin(held);
    Core::template product<k_outer, k_outer, false, kLoads>(held, other_tile(), stage() + Layout::d_o,
                                                            thread_shuffled<Core>(fresh_thread()));
    Core::finish(held);
  }
  const int index = view.index_there();
  __syncthreads();  // all operands have been read
  const std::uint32_t parts = view.stage_of(index);
  put_halves<Core>(parts + Layout::d_o + (first_group ? 0 : kTileBytes), parts + (first_group ? Layout::q : Layout::k),
                   fresh_thread(), [at = e()](float(&x)[8], int k16) { at.get(k16, x); });
  // The gradient before the chunk holds the queries' products as they are in dq, rounded once more for its own sake:
  // dg has the sum of the former.
  if (!first_group && fresh_thread() < kTile) {
    const int channel = fresh_thread();
    const std::uint32_t beyond = view.base + Layout::beyond;
    float sum = float_at(beyond, channel);
#pragma unroll
    for (int w = 0; w < kBlocks; ++w) sum += float_at(by_queries(w), channel);
    put_float(beyond, channel, sum);
  }
  __syncthreads();  // what lay in the tiles of the chunk before has been read
  view.load_before(index);
  return index;
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
