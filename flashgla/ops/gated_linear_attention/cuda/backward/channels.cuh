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
  const Params& p = view.p;
  const Gradients& d = view.f.gradients;
  const auto block = static_cast<int>(fresh_block());
  const int head = block % p.heads;
  const Span span = span_of(p.sequences, block / p.heads);
  const int last = (chunks == kAllChunks ? static_cast<int>((span.length + kChunk - 1) / kChunk) : chunks) - 1;
  const std::int64_t states_step = p.heads * kImageBytes;
  const auto states_at = [&](int index) {
    return static_cast<const char*>(p.states) + (span.chunk_begin + index) * states_step + head * kImageBytes;
  };
  const int rows = static_cast<int>(span.length - static_cast<std::int64_t>(last) * kChunk);
  if (threadIdx.x == 0) {  // what is read is asked for a chunk ahead
    const Places places = view.places();
    const auto start = [&](Places::Tensor tensor, const Strided& s, int index, int element = 2) {
      places.start(last, tensor, chunk_place(s, span, index, head, element), s.token * kChunk * element);
    };
    start(Places::q, p.q, last - 1);
    start(Places::d_o, d.d_o, last - 1);
    start(Places::k, p.k, last - 1);
    start(Places::v, p.v, last - 1);
    places.start(last, Places::states, states_at(last - 1), states_step);
    start(Places::g, p.g, last - 1, view.kGateBytes);
    std::uint32_t wanted = 0;
    const auto gradient = [&](Places::Tensor tensor, const Strided& s, int element = 2) {
      start(tensor, s, last, element);
      wanted |= (s.data != nullptr ? 1u : 0u) << tensor;
    };
    gradient(Places::dq, d.dq);
    gradient(Places::dk, d.dk);
    gradient(Places::dv, d.dv);
    gradient(Places::dg, d.dg, view.kGateBytes);
    store_shared_4(view.base + Layout::wanted, wanted);
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
  const char* gates = chunk_place(p.g, span, last, head, view.kGateBytes);
  view.load_from(last, rows, chunk_place(first_group ? p.q : p.k, span, last, head, 2),
                 chunk_place(first_group ? d.d_o : p.v, span, last, head, 2), gates, states_at(last));
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
    read_state(held, f.d_ht == nullptr ? nullptr : f.d_ht + view.state_at(), p.key_dim, p.value_dim, 0, 0,
               fresh_thread());
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
    write_state(f.dh0 + view.state_at(), held, p.key_dim, p.value_dim, 0, 0, fresh_thread());
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
