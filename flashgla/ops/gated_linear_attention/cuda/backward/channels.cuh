// The backward of heads of up to 64 x 64 with key gates of bf16 in one kernel; equations: backward/keys.cuh, roles:
// backward/README.md. As in backward/rows.cuh a block walks a sequence and head back in time with dh in registers.
// Gates are summed on tensor cores: running sums are a triangle of ones times the tile of gates, and dg, what the state
// before the chunk has less a sum over earlier tokens, is one times E = q dq - k dk. E goes in as two bf16 numbers, 16
// bits of mantissa; the sums are f32. What the two thread groups do alike is one piece of code for both, for the
// instruction cache's sake. Each rung of the ladder has a path of its own through a chunk: what they shared would cost
// the first one registers.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/backward/channels_by_blocks.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/backward/channels_half_blocks.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/backward/channels_view.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// The products of a chunk within one anchor's reach. held: in the first group dv is left there, in the second dh goes
// on; d: in the first group dq, in the second dk.
template <class Core, GatesAs kGates>
__device__ __forceinline__ void products_of_chunk(const ChannelsView<Core, kGates>& view, int index, Accumulator& d,
                                                  Accumulator& held, float2 decay) {
  using Layout = ChannelsShared;
  constexpr Stored k_inner = Stored::k_inner, k_outer = Stored::k_outer;
  constexpr Loads kLoads = Loads::in_turn;
  const bool first_group = view.first_group;
  const int thread = thread_shuffled<Core>(fresh_thread());
  const std::uint32_t stage = view.stage_of(view.index_now(index)), x_tile = view.x_tile();
  const std::uint32_t q = stage + Layout::q, k = stage + Layout::k, d_o = stage + Layout::d_o, v = stage + Layout::v,
                      h = stage + Layout::h;
  std::uint32_t pairs[16] = {};  // [query][key] in the first group, and [key][query] in the second
  if constexpr (std::is_same_v<Core, TensorCore80>) {
    // One product at a time, in a loop, for unrolled ptxas has both under way, and one code for both groups. The first
    // group's scores come before its pairs.
    std::uint32_t scores[16];
    const std::uint32_t own = first_group ? d_o : v, other = first_group ? v : d_o;
#pragma unroll 1
    for (bool of_scores = first_group;; of_scores = false) {
#pragma unroll
      for (int i = 0; i < 16; ++i) scores[i] = pairs[i];
      Accumulator a;
      Core::template product<k_inner, k_inner, true, kLoads>(a, of_scores ? k : own, of_scores ? q : other,
                                                             thread_shuffled<Core>(thread));
      select_pairs(pairs, a, of_scores || !first_group, thread_shuffled<Core>(thread));
      if (!of_scores) break;
    }
    if (first_group) {
      Core::template product<k_inner, k_outer, true, kLoads>(held, k, x_tile, thread_shuffled<Core>(thread));
      Core::template product<k_outer, false, kLoads>(held, scores, d_o, thread_shuffled<Core>(thread));
    } else {
      scale_rows(held, decay.x, decay.y);
      Core::template product<k_outer, k_outer, false, kLoads>(held, q, d_o, thread_shuffled<Core>(thread));
    }
    Core::template product<k_inner, k_inner, true, kLoads>(d, own, first_group ? h : x_tile,
                                                           thread_shuffled<Core>(thread));
    Core::template product<k_outer, false, kLoads>(d, pairs, first_group ? k : q, thread_shuffled<Core>(thread));
    if (!first_group) view.put_beyond(dot_rows(h, held, thread_shuffled<Core>(thread)));
  } else if (first_group) {
    std::uint32_t scores[16];
    {
      Accumulator s, a;  // [key][query], [query][key]
      Core::begin();
      Core::template product<k_inner, k_inner, true>(s, k, q, fresh_thread());
      Core::template product<k_inner, k_inner, true>(a, d_o, v, fresh_thread());
      Core::finish(s, a);
      select_pairs<true>(scores, s, fresh_thread());
      select_pairs<false>(pairs, a, fresh_thread());
    }
    Core::begin(scores);
    Core::template product<k_inner, k_outer, true>(held, k, x_tile, fresh_thread());
    Core::template product<k_outer>(held, scores, d_o, fresh_thread());
    Core::finish(held);
    Core::begin(pairs);
    Core::template product<k_inner, k_inner, true>(d, d_o, h, fresh_thread());
    Core::template product<k_outer>(d, pairs, k, fresh_thread());
    Core::finish(d);
  } else {
    scale_rows(held, decay.x, decay.y);
    {
      Accumulator a;
      Core::begin();
      Core::template product<k_inner, k_inner, true>(a, v, d_o, fresh_thread());
      Core::finish(a);
      select_pairs<true>(pairs, a, fresh_thread());
    }
    Core::begin(pairs, held);
    Core::template product<k_inner, k_inner, true>(d, v, x_tile, fresh_thread());
    Core::template product<k_outer>(d, pairs, q, fresh_thread());
    Core::template product<k_outer, k_outer>(held, q, d_o, fresh_thread());
    Core::finish(d, held);
    view.put_beyond(dot_rows(h, held, fresh_thread()));
  }
}

constexpr int kAllChunks = -1;

// Where the walk over a sequence's first so many chunks begins, in shared memory, and the last of them is asked for.
template <class Core, GatesAs kGates>
__device__ __forceinline__ void start_walk(const ChannelsView<Core, kGates>& view, int chunks, Rung rung) {
  using Layout = ChannelsShared;
  const Gradients& d = view.f.gradients;
  const OwnSequence own(view.p, static_cast<int>(fresh_block()));
  const int last = (chunks == kAllChunks ? own.chunks() : chunks) - 1, rows = own.rows(last);
  if (threadIdx.x == 0) {
    own.start(view.places(), d, last, view.kGateBytes, 1);
    const auto bit = [](Places::Tensor gradient, const Strided& s) { return s.data != nullptr ? 1u << gradient : 0u; };
    store_shared_4(view.base + Layout::wanted,
                   bit(Places::dq, d.dq) | bit(Places::dk, d.dk) | bit(Places::dv, d.dv) | bit(Places::dg, d.dg));
    store_shared_4(view.base + Layout::last, last);
    store_shared_4(view.base + Layout::last_rows, rows);
    store_shared_4(view.base + Layout::rung, static_cast<std::uint32_t>(rung));
    store_shared_4(view.base + Layout::gates_held, 0);
  }
  if constexpr (ChannelsView<Core, kGates>::kAnchors) {
    Triangles::put(view.triangles());
    view.anchors().put_ones(threadIdx.x);
  }
  __syncthreads();
  if (last < 0) return;
  const bool first_group = view.first_group;
  const char* gates = own.place(view.p.g, last, view.kGateBytes);
  view.load_from(last, rows, own.place(first_group ? view.p.q : view.p.k, last),
                 own.place(first_group ? d.d_o : view.p.v, last), gates, own.state(last));
}

// The next chunk's tiles are there, and dv and dg of the one after it leave; false beyond the sequence's start.
template <bool kMayBeHeld, class Core, GatesAs kGates>
__device__ __forceinline__ bool begin_chunk(const ChannelsView<Core, kGates>& view, int index,
                                            const Accumulator& held) {
  ptx::copy_async_wait<0>();
  Core::publish();
  __syncthreads();  // all tiles are there, and E of the chunk after
  if (index < view.last_chunk()) view.template finish_after<kMayBeHeld>(index, held);
  if (index < 0) return false;
  view.put_index(index);
  if constexpr (kGates == GatesAs::logits) view.turn_gates(index);
  return true;
}

// Chunks from a sequence's end on; how many are left. kOneAnchor: while one anchor reaches, in a loop of its own, for
// what the other rungs cost a chunk is to be in the same one; else all, each by the rung that serves it.
template <bool kOneAnchor, class Core, GatesAs kGates>
__device__ __forceinline__ int walk_back(const ChannelsView<Core, kGates>& view, Accumulator& held) {
  constexpr bool kByRungs = view.kAnchors && !kOneAnchor;
#pragma unroll 1
  for (int index = view.last_chunk();; --index) {
    if (!begin_chunk<kByRungs>(view, index, held)) return 0;
    float2 decay = make_float2(1.0f, 1.0f);
    Accumulator d;  // of the first group dq, of the second dk
    // A chunk that its rung does not serve goes by blocks.
    const Rung rung = kOneAnchor ? Rung::one_anchor : view.rung();
    if (rung == Rung::one_anchor) {
      const bool in_range = view.template gate_in_place<false>(index, held, decay);
      Core::publish();
      const bool steep = __syncthreads_or(!in_range);  // the operands are there
      if (!steep) {
        view.load_before(index);
        if constexpr (kByRungs) view.put_gates_held(false);
        products_of_chunk(view, index, d, held, decay);
        __syncthreads();  // the operands have been read
        index = view.index_there();
        view.template leave<false>(index, d);
        continue;
      }
      if constexpr (kOneAnchor) return index + 1;
      view.reload(view.index_now(index));
      if constexpr (view.kAnchors) __syncthreads();
    } else if (!view.kAnchors) {
      __syncthreads();  // E and dv of the chunk after have been read
    }
    if constexpr (kByRungs) {
      if (rung == Rung::anchors) {
        const bool in_range = view.template gate_in_place<true>(index, held, decay);
        Core::publish();
        const bool steep = __syncthreads_or(!in_range);
        if (!steep) {
          view.load_before(index);
          std::uint32_t none[16];
          anchored_products<kBlocks>(view, index, d, held, none);
          __syncthreads();
          index = view.index_there();
          view.template leave<true>(index, d);
          continue;
        }
        view.reload(index);
        __syncthreads();
      }
      const bool are_numbers = gate_half_blocks(view, index, held);
      Core::publish();
      if (!__syncthreads_or(!are_numbers)) {
        view.load_before(index);
        std::uint32_t others[16];
        anchored_products<kHalfBlocks>(view, index, d, held, others);
        __syncthreads();
        index = view.index_there();
        leave_half_blocks(view, index, d, others);
        continue;
      }
      view.reload(index);
      view.put_gates_held(false);
    }
    index = chunk_by_blocks(view, d, held);
    view.store_rows(index, d);
  }
}

// Grid: N x G. One query head a kv head; states kept.
template <class Core, GatesAs kGates>
__device__ __forceinline__ void backward_channels(const Params& p, const FusedBackward& f, char* shared) {
  const ChannelsView<Core, kGates> view{p, f, ptx::shared_address(shared), in_first_group()};
  start_walk(view, kAllChunks, Rung::one_anchor);
  Accumulator held;  // of the first group dv, of the second dh
  if (view.first_group) {
    clear(held);
  } else {
    read_state(held, state_of(f.d_ht, p, fresh_block()), p.key_dim, p.value_dim, 0, 0, fresh_thread());
  }
  if constexpr (view.kAnchors) {
    const int left = walk_back<true>(view, held);
    if (left > 0) {
      start_walk(view, left, Rung::anchors);
      walk_back<false>(view, held);
    }
  } else {
    walk_back<false>(view, held);
  }
  if (!view.first_group && f.dh0 != nullptr) {
    write_state(state_of(f.dh0, p, fresh_block()), held, p.key_dim, p.value_dim, 0, 0, fresh_thread());
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
