// Forward in one pass for K <= 64: a group of 128 threads walks through one (sequence, query head, slice of 64 value
// channels) with the state in registers; q, k, v, the gates and o each cross device memory once a slice. With one
// anchor a chunk (forward/gates.cuh)
//
//     key gates:         q~ = q 2^G, k~ = k 2^-G;  o = scale (select(q~ k~^T) v + q~ h);  h' = 2^G_last (h + k~^T v)
//     one gate a token:  v~ = v 2^-G;  o = scale 2^G (select(q k^T) v~ + q h);            h' = 2^G_last (h + k^T v~)
//
// and beyond its range with k 2^(G_last - G), plain v and the decay before the product.
//
// A block has one such group or two, of which those of a pair of heads move their rows together: README.md, "One pass".
// Of a group's seven tiles q and k have two slots each; with a key gate v and g have one, refilled as soon as they are
// read, else v has two. One slot holds h as the operand of q~ h. o leaves through the slot of q.
#pragma once

#include "flashgla/base/context.h"
#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/forward/fused_view.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/launch.h"
#include "flashgla/ops/gated_linear_attention/cuda/limits.h"

namespace flashgla::ops::gated_linear_attention::cuda {

// A chunk of key gates that no rung with wgmma serves, by blocks: scores, q 2^G and k 2^(later gates) in place, the
// decay and the next chunk's rung. `reload` brings q and k again.
template <class Core, class Reload>
__device__ __forceinline__ void gate_keys_by_blocks(Local<std::uint32_t, 16>& steep_scores, Accumulator& h,
                                                    Place (&places)[kFusedTensors], Rung& rung, float2& decay,
                                                    std::uint32_t q, std::uint32_t k, std::uint32_t g_tile,
                                                    const Reload& reload) {
  constexpr bool kAsynchronous = !std::is_same_v<Core, TensorCore80>;
  Local<float, 32> state;
  Local<Place, kFusedTensors> walk;
  state.put(h);
  walk.put(places);
  if (rung == Rung::one_anchor) reload();
  decay = decay_of_rows(g_tile, fresh_thread());
  Accumulator s;
  clear(s);
  const std::uint32_t q_tile = alike_shuffled<TensorCore80>(q);  // nothing holds it
  gate_by_blocks<Core, false, kAsynchronous>(
      s, q_tile, q_tile + (k - q), g_tile, 1.0f,
      [&](Accumulator& sums, int thread) { sum_block(sums, g_tile, thread); },
      [&](float2 sum, bool each_near) {
        const bool one_reaches = one_anchor_reaches(sum), near = __all_sync(0xffffffffu, each_near) != 0;
        rung = one_reaches      ? Rung::one_anchor
               : !kAsynchronous ? Rung::blocks
               : near           ? Rung::anchors
                                : Rung::half_blocks;
      });
  std::uint32_t pairs[16];
  select_pairs<false>(pairs, s, fresh_thread());
  steep_scores.put(pairs);
  state.get(h);
  walk.get(places);
  Core::publish();
  sync_fresh_group();
}

// One gate a token beyond the reach of one anchor. next_gates, of the next chunk, waits too.
template <class Core, GatesAs gate, bool kPairs, int kGates>
__device__ __forceinline__ void gate_tokens_steeply(Local<std::uint32_t, 16>& steep_scores, Accumulator& h,
                                                    Place (&places)[kFusedTensors], std::uint32_t (&next_gates)[kGates],
                                                    const float (&gates)[kGates], const float& constant_gate,
                                                    std::uint32_t q, std::uint32_t k, int group, const int& left,
                                                    int lane) {
  Local<float, 32> state;
  Local<Place, kFusedTensors> walk;
  state.put(h);
  walk.put(places);
  if constexpr (gate == GatesAs::constant) {
    const float each = alike_shuffled<Core>(constant_gate);
    gate_steep_tokens(steep_scores, q, k, make_float2(2 * lane < left ? each : 0.0f, 2 * lane + 1 < left ? each : 0.0f),
                      fresh_thread());
  } else {
    Local<std::uint32_t, kGates> ahead;
    ahead.put(next_gates);
    float2 pair;
    if constexpr (kPairs) {  // of tokens 2 lane and 2 lane + 1 of this group's head
      const int lane = fresh_thread() % 32;
      float of_token[kGates];
#pragma unroll
      for (int i = 0; i < kGates; ++i) of_token[i] = __shfl_sync(0xffffffffu, gates[i], 16 * group + lane / 2);
      pair = lane & 1 ? make_float2(of_token[2], of_token[3]) : make_float2(of_token[0], of_token[1]);
    } else {
      pair = make_float2(gates[0], gates[1]);
    }
    gate_steep_tokens(steep_scores, q, k, pair, fresh_thread());
    ahead.get(next_gates);
  }
  state.get(h);
  walk.get(places);
}

// ---- the walk ----

// Of key gates on wgmma the chunks until one that one anchor does not reach have a loop of their own, for what the
// other rungs cost a chunk is to be in the same one; `rest` goes on from there, that chunk's q and k being lost.
enum class Part { whole, one_anchor, rest };

// Groups of the grid: N * H * ceil(V / 64), value slices fastest; those of one block are of one sequence. asks_early: a
// chunk is asked for before the one before it has come, else when it has, or still later; of pairs alone, others always
// do.
template <class Core, GatesAs gate, bool kPairs>
__device__ __forceinline__ void fused(const Params& p, bool asks_early, char* shared) {
  constexpr Stored k_inner = Stored::k_inner, k_outer = Stored::k_outer;
  constexpr Loads kLoads = Loads::in_turn;
  using View = FusedView<Core, gate, kPairs>;
  constexpr bool in_f32 = View::in_f32, key = View::key,
                 by_token = gate == GatesAs::constant || gate == GatesAs::tokens;
  const int group = own_group();
  const std::uint32_t base = ptx::shared_address(shared) + group * (kFusedTiles * kTileBytes);
  const int thread = fresh_thread();
  const auto own_unit = [&] { return fresh_block() * (blockDim.x / kGroupThreads) + group; };
  const int slices = kPairs ? 1 : (p.value_dim + 63) / 64;
  const View view{.p = p,
                  .group = group,
                  .base = base,
                  .moved_base = kPairs ? ptx::shared_address(shared) : base,
                  .v0 = static_cast<int>(own_unit() % slices * 64),
                  .K = kPairs ? kTile : p.key_dim,
                  .V = kPairs ? kTile : p.value_dim};
  const int K = view.K, V = view.V, v0 = view.v0;
  const int heads = p.heads * p.group;
  const std::int64_t n = own_unit() / slices / heads;
  const int query_head = static_cast<int>(own_unit() / slices % heads), head = query_head / p.group;
  const int first_head = kPairs ? query_head - group : query_head;  // of those whose rows this thread moves
  const int first_key_head = kPairs ? first_head : head;
  const Span span = span_of(p.sequences, n);
  int left = static_cast<int>(span.length);  // tokens from the chunk that is worked on

  const std::uint32_t g_tile = base + View::g_slot, h_tile = base + View::h_slot;
  Place places[kFusedTensors];
  View::first_places(places, p, span, n, head, first_head, first_key_head, v0);
  Place &q_next = places[kFusedQ], &k_next = places[kFusedK], &v_next = places[kFusedV], &o_next = places[kFusedO],
        &g_next = places[kFusedGates], &states_next = places[kFusedStates];
  const auto rows_here = [&] { return min(left, kChunk); };
  const auto rows_next = [&] { return min(left - kChunk, kChunk); };
  const auto token_scales = [&](const TokenSums& sums) {
    return make_float2(p.scale * ptx::exp2(sums.own.x), p.scale * ptx::exp2(sums.own.y));
  };
  float constant_gate = 0.0f, moved_constant = 0.0f;
  typename View::RawGates next_gates = {};
  if (left > 0) {
    view.load(0, q_next, p.q, rows_here(), K);
    view.load(2 * kTileBytes, k_next, p.k, rows_here(), K);
    if constexpr (key) {
      if (View::may_stage_gates && !asks_early) {
        view.stage_gates(g_next, left);
      } else {
        view.load_gates(g_next, left, std::false_type());
      }
      ptx::copy_async_commit();
    }
    view.load(View::v_slots, v_next, p.v, rows_here(), V - v0);
    ptx::copy_async_commit();
    if constexpr (gate == GatesAs::constant) {
      constant_gate = key_gate(p, span.batch, span.begin, head, 0);
      moved_constant = kPairs ? key_gate(p, span.batch, span.begin, first_key_head + thread / 8 % 2, 0) : constant_gate;
    }
    if constexpr (gate == GatesAs::tokens) view.token_gates(next_gates, g_next, rows_here());
  }
  Accumulator h;
  read_state(h, view.own_state(p.h0), K, V, 0, v0, thread);
  put_rounded<Core>(h_tile, h, thread);
  const bool keeps_states = p.states != nullptr && view.leads();
  __syncwarp();
  if (keeps_states && left > 0) view.write_states(states_next, thread);

  constexpr bool kAsynchronous = !std::is_same_v<Core, TensorCore80>;
  Rung rung = Rung::one_anchor;
  int done = 0;
  const auto walk = [&](auto of_part) __attribute__((always_inline)) {
    constexpr Part part = decltype(of_part)::value;
    bool begun = part == Part::rest;  // the chunk, in the loop before
    // Of pairs with key gates the next chunk's rows are asked for together, when this one's products are done.
    const bool asks_last = kPairs && key && part != Part::rest && !asks_early;
    const bool stages_gates = View::may_stage_gates && asks_last;  // so k has one slot alone
    int c = done;
#pragma unroll 1
    for (; left > 0; ++c, left -= kChunk) {
      const int thread = fresh_thread();
      const std::uint32_t parity = (c & 1) * kTileBytes, other = kTileBytes - parity;
      const std::uint32_t v_slot = View::v_slots + (key ? 0 : parity);
      const std::uint32_t q = base + parity, k = q + 2 * kTileBytes - (stages_gates ? parity : 0), v = base + v_slot;
      // Of pairs o of the chunk before leaves only now, by those who refill its slot.
      const auto load_next = [&] {
        if (kPairs && c > 0) view.store_o(o_next, other, kChunk, thread_shuffled<Core>(thread));
        if (left > kChunk) {
          view.load(other, q_next, p.q, rows_next(), K);
          view.load(2 * kTileBytes + (stages_gates ? 0 : other), k_next, p.k, rows_next(), K);
          if constexpr (!key) view.load(View::v_slots + other, v_next, p.v, rows_next(), V - v0);
        }
        ptx::copy_async_commit();
      };
      if (!begun) {
        if (kPairs && !asks_early) {
          ptx::copy_async_wait<key ? 1 : 0>();
        } else {
          if constexpr (kPairs) sync_pair(thread);
          load_next();
          ptx::copy_async_wait<key ? 2 : 1>();
        }
      }
      const auto load_late = [&] {
        if (kPairs && !asks_early && !asks_last) load_next();
      };
      const auto leave_chunk = [&](Accumulator& o, float2 o_scale) {
        __syncthreads();  // the operands have been read, by both groups: they ask for the next rows together
        if (asks_last) load_next();
        if constexpr (key) {
          if (asks_last) {
            if (left > kChunk) {
              stages_gates ? view.stage_gates(g_next, left - kChunk)
                           : view.load_gates(g_next, left - kChunk, std::false_type());
            }
            ptx::copy_async_commit();
          }
          if (left > kChunk) view.load(v_slot, v_next, p.v, rows_next(), V - v0);
          ptx::copy_async_commit();
        }
        const int mover = thread_shuffled<Core>(fresh_thread());
        put_rounded<Core>(h_tile, h, mover);
        scale_rows(o, o_scale.x, o_scale.y);
        put_rounded<Core>(q, o, mover);
        __syncwarp();
        if constexpr (!kPairs) view.store_o(o_next, parity, left, mover);
        if (keeps_states && left > kChunk && p.keeps_state_after(c)) view.write_states(states_next, mover);
      };

      bool one_anchor = true;
      float2 decay = make_float2(1.0f, 1.0f), o_scale = make_float2(p.scale, p.scale);
      Local<std::uint32_t, 16> steep_scores;
      if constexpr (key) {
        if (!begun) {
          if (stages_gates) round_staged_gates(g_tile, base + View::staged_slot, fresh_thread());
          if (!in_f32 && p.logit_scale != 0.0f) view.turn_logits_here(rows_here());
          Core::publish();
          view.sync_moved();  // g, q and k are there
        }
        load_late();
        // The rung has served this group, or not. Either group of a pair refills both tiles of gates, so each waits for
        // the other: beyond.
        bool beyond;
        const auto served = [&](bool own) {
          if (asks_last) {
            ptx::copy_async_wait<0>();
          } else {
            ptx::copy_async_wait<1>();
          }
          Core::publish();
          beyond = kPairs ? __syncthreads_or(!own) : sync_fresh_group_or(!own);
          return __any_sync(0xffffffffu, kPairs && beyond ? sync_fresh_group_or(!own) : beyond) == 0;
        };
        const auto refill_gates = [&](auto in_halves) {
          if (kPairs && beyond) __syncthreads();
          if (asks_last) return;
          if (left > kChunk) view.load_gates(g_next, left - kChunk, in_halves);
          ptx::copy_async_commit();
        };
        if (begun) {
          beyond = true;
          one_anchor = begun = false;
        } else if (part != Part::one_anchor && kAsynchronous && rung == Rung::anchors) {
          if constexpr (kAsynchronous && part != Part::one_anchor) {
            AnchoredChunk anchored;
            one_anchor = false;
            if (served(anchored.take(g_tile))) {
              refill_gates(std::true_type());
              Local<Place, 1> aside;  // registers are for the products
              aside.x[0] = g_next;
              Accumulator o;
              if (anchored.template products<Core>(o, h, q, k, v, h_tile)) rung = Rung::one_anchor;
              g_next = aside.x[0];
              leave_chunk(o, o_scale);
              continue;
            }
          }
        } else {
          one_anchor = served((part == Part::one_anchor || rung == Rung::one_anchor) &&
                              gate_by_channel<Core>(q, k, g_tile, decay, thread));
        }
        if constexpr (part == Part::one_anchor) {
          // Where k has one slot both groups of a pair go on elsewhere together, for either moves rows of both.
          if (stages_gates ? beyond : !one_anchor) break;
        }
        const auto reload = [&] { view.load_again(q, k, q_next, k_next, left); };
        if constexpr (kAsynchronous && part != Part::one_anchor) {
          if (!one_anchor) {
            if (rung == Rung::one_anchor) reload();
            Local<Place, kFusedTensors> walk;  // registers are for the products
            walk.put(places);
            std::uint32_t queries[16];
            gate_half_blocks<Core>(queries, q, k, g_tile);
            Core::publish();
            sync_fresh_group();
            const NextRung next = rung_of_half_blocks(q);
            if (!next.is_nan) {
              rung = next.rung;
              Accumulator o;
              half_block_products<Core>(o, h, queries, q, k, v, h_tile);
              walk.get(places);
              refill_gates(std::true_type());
              leave_chunk(o, o_scale);
              continue;
            }
            walk.get(places);
            sync_fresh_group();       // all have read the factors
            rung = Rung::one_anchor;  // q and k are lost
          }
        }
        if (part != Part::one_anchor && !one_anchor) {
          gate_keys_by_blocks<Core>(steep_scores, h, places, rung, decay, q, k, g_tile, reload);
        }
        refill_gates(std::false_type());
      } else if constexpr (by_token) {
        float gates[View::kGates];
#pragma unroll
        for (int i = 0; i < View::kGates; ++i) gates[i] = base_2_gate(gate_from_bits(p.gate_dtype, next_gates[i]));
        if constexpr (gate == GatesAs::tokens) view.token_gates(next_gates, g_next, left > kChunk ? rows_next() : 0);
        const TokenSums sums = gate == GatesAs::constant ? constant_sums(constant_gate, moved_constant,
                                                                         view.moved_row(thread), rows_here(), thread)
                                                         : scan_tokens(gates, group, thread);
        one_anchor = sums.total >= -kRange;
        decay.x = decay.y = ptx::exp2(sums.total);
        const auto gate_steeply = [&] {
          gate_tokens_steeply<Core, gate, kPairs>(steep_scores, h, places, next_gates, gates, constant_gate, q, k,
                                                  group, left, thread % 32);
        };
        // Of pairs each head's decision is its own, and v's rows are moved for either.
        if (one_anchor) o_scale = token_scales(sums);
        if (kPairs ? sums.moved_total >= -kRange : one_anchor) {
          view.gate_values(v_slot, sums, thread);
        } else if constexpr (!kPairs) {
          gate_steeply();
        }
        Core::publish();
        view.sync_moved();  // the operands are there
        load_late();
        if (kPairs && !one_anchor) {
          gate_steeply();
          Core::publish();
          sync_fresh_group();
        }
      } else {
        Core::publish();
        view.sync_moved();
        load_late();
      }

      // h is both the operand in its tile and, in registers, what the next one comes from.
      if (part != Part::one_anchor && !one_anchor) scale_rows(h, decay.x, decay.y);
      Accumulator s;
      std::uint32_t scores[16];
      Core::begin(h);
      Core::template product<k_inner, k_inner, true, kLoads>(s, q, k, thread_shuffled<Core>(thread));
      Core::commit();
      const auto step_state = [&] {
        Core::template product<k_outer, k_outer, false, kLoads>(h, k, v, thread_shuffled<Core>(thread));
      };
      const auto decay_state = [&] {
        if constexpr (gate == GatesAs::constant) {  // worked out anew rather than held
          const float each = alike_shuffled<Core>(constant_gate);
          const TokenSums sums =
              constant_sums(each, each, 0, min(alike_shuffled<Core>(left), kChunk), thread_shuffled<Core>(thread));
          decay.x = decay.y = ptx::exp2(sums.total);
          o_scale = one_anchor ? token_scales(sums) : make_float2(p.scale, p.scale);
        }
        if (part == Part::one_anchor || one_anchor) scale_rows(h, decay.x, decay.y);
      };
      // With wgmma the state is stepped while scores are selected; with mma.sync before there is an accumulator of o.
      if constexpr (kAsynchronous) step_state();
      Core::commit();
      Core::template wait<1>(s);
      select_pairs<false>(scores, s, thread);
      if (part != Part::one_anchor && !one_anchor) steep_scores.get(scores);
      if constexpr (!kAsynchronous) {
        step_state();
        decay_state();
      }
      Accumulator o;
      Core::begin(scores);
      if constexpr (kAsynchronous) {
        Core::template product<k_inner, k_outer, true>(o, q, h_tile, thread);
        Core::template product<k_outer>(o, scores, v, thread);
        Core::commit();
        Core::template wait<1>(h);
        decay_state();
      } else {
        Core::template product<k_outer, true, kLoads>(o, scores, v, thread_shuffled<Core>(thread));
        Core::template product<k_inner, k_outer, false, kLoads>(o, q, h_tile, thread_shuffled<Core>(thread));
      }
      Core::template wait<0>(o);
      leave_chunk(o, o_scale);
    }
    done = c;
  };
  if constexpr (key && kAsynchronous && (kPairs || !in_f32)) {
    walk(std::integral_constant<Part, Part::one_anchor>());
    done = __shfl_sync(0xffffffffu, done, 0);  // or a register is one for both, and spilled in both
    walk(std::integral_constant<Part, Part::rest>());
  } else {
    walk(std::integral_constant<Part, Part::whole>());
  }
  if (const int c = done; kPairs && c > 0) {
    const int mover = fresh_thread();
    sync_pair(mover);
    view.store_o(o_next, (c - 1) % 2 * kTileBytes, left + kChunk, mover);
  }
  if (p.ht != nullptr && view.leads()) {
    write_state(view.own_state(p.ht), h, K, V, 0, static_cast<int>(own_unit() % view.own_slices()) * 64,
                fresh_thread());
  }
}

template <class Core, GatesAs gate, bool kPairs>
__global__ void __launch_bounds__(2 * kGroupThreads, 2)
    fused_kernel(const __grid_constant__ Params p, bool asks_early) {
  flashgla::cuda::wait_for_previous();
  release_other_way(p.sequences);
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Core::available) fused<Core, gate, kPairs>(p, asks_early, shared);
}

// Rows are asked for early where a multiprocessor has one block: two have enough under way, and asking in step is
// faster then. Such blocks do not begin beside the kernels of feature maps, which let the next ones in at their start:
// they would lie several on one of the multiprocessors that have room.
template <class Core>
void launch_fused(Context& context, const Params& p, const OnePass& form) {
  static_assert(kFusedTiles * kTileBytes == kOnePassSharedBytes);
  using flashgla::cuda::Begin;
  const std::int64_t blocks = p.sequences.count * p.heads * p.group * tiles_of(p.value_dim) / form.groups;
  const bool one_each = blocks <= context.architecture().multiprocessors;
  const auto launch = [&](auto* kernel) {
    flashgla::cuda::launch("gated_linear_attention forward", kernel, dim3(static_cast<unsigned>(blocks)),
                           form.groups * kGroupThreads, form.groups * kOnePassSharedBytes,
                           static_cast<cudaStream_t>(context.stream()),
                           one_each && form.behind_features ? Begin::after_previous : kNext<Core>, p, one_each);
  };
  with_gates_of<true>(p, [&]<GatesAs gate>() {
    if constexpr (std::is_same_v<Core, TensorCore90>) {
      if (form.pairs) return launch(fused_kernel<Core, gate, true>);
    }
    launch(fused_kernel<Core, gate, false>);
  });
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
