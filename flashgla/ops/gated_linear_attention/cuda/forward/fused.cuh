// Forward in one pass for K <= 64: a group of 128 threads walks through one (sequence, query head, slice of 64 value
// channels) with the state in registers; q, k, v, the gates and o each cross device memory once a slice. bf16, key
// gates in bf16. With one anchor a chunk (forward/gates.cuh)
//
//     key gates:         q~ = q 2^G, k~ = k 2^-G;  o = scale (select(q~ k~^T) v + q~ h);  h' = 2^G_last (h + k~^T v)
//     one gate a token:  v~ = v 2^-G;  o = scale 2^G (select(q k^T) v~ + q h);            h' = 2^G_last (h + k^T v~)
//
// and beyond its range with k 2^(G_last - G), plain v and the decay before the product.
//
// A block has one such group, or two (the plan says when). Two share one barrier a chunk and nothing else: neighbouring
// heads then ask for neighbouring rows of 128 bytes at about the same time, which the memory answers 4 to 7% faster.
// Or, where these lie side by side, each group moves half of the rows of both heads, 256 bytes of a row by one
// instruction. Shared memory is what lets four groups, 512 sequence-heads on the card, live at once: seven tiles, 56
// KiB. q and k have two slots each; with a key gate v and g have one, refilled as soon as they are read, else v has
// two. One slot holds h as the operand of q~ h. o leaves through the slot of q.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/forward/fused_gates.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

enum class FusedGate { none, constant, scalar, key, f32_key };

constexpr int kFusedTiles = 7;

// kPairs, below: rows are not moved by each group for its head (pieces.cuh), but by both groups of a block for both
// heads, whose K = V = 64 channels lie side by side in every tensor, with a state each.

// Of pairs a thread moves piece thread % 8 of head thread / 8 % 2 of the block, rows pair_row + {0..3}: a warp two rows
// of 256 bytes at once. Warps of the same number in both groups move the 16 rows that both multiply.
__device__ __forceinline__ int pair_row(int group, int thread) {
  return thread / 32 * 16 + group * 8 + thread % 32 / 16 * 4;
}
// Where the piece of row i lies, from the tile of the block's first head on.
__device__ __forceinline__ std::uint32_t pair_piece(int group, int thread, int i) {
  return thread / 8 % 2 * (kFusedTiles * kTileBytes) +
         (tile_piece(pair_row(group, thread), thread % 8) ^ static_cast<std::uint32_t>(i << 4)) + 128 * i;
}
// Between warps of the same number (barriers 1 and 2 are the groups').
__device__ __forceinline__ void sync_pair(int thread) { ptx::barrier(3 + thread / 32, 64); }

// ---- the walk ----

// Groups of the grid: N * H * ceil(V / 64), value slices fastest; those of one block are of one sequence. asks_early: a
// chunk is asked for before the one before it has come, else when it has; of pairs alone, others always do.
template <class Core, FusedGate gate, bool kPairs>
__device__ __forceinline__ void fused(const Params& p, bool asks_early, char* shared) {
  constexpr Stored k_inner = Stored::k_inner, k_outer = Stored::k_outer;
  constexpr Loads kLoads = Loads::in_turn;
  constexpr bool in_f32 = gate == FusedGate::f32_key, key = gate == FusedGate::key || in_f32,
                 by_token = gate == FusedGate::constant || gate == FusedGate::scalar;
  const int group = own_group();
  const std::uint32_t base = ptx::shared_address(shared) + group * (kFusedTiles * kTileBytes);
  // What this thread moves: pieces of its group's tiles, or of both groups' from the first one's on.
  const std::uint32_t moved_base = kPairs ? ptx::shared_address(shared) : base;
  const auto moved_row = [&](int thread) { return kPairs ? pair_row(group, thread) : kRowsEach * (thread / 8); };
  const auto moved_piece = [&](int thread, int i) {
    return kPairs ? pair_piece(group, thread, i) : own_piece(thread, i);
  };
  const auto sync_moved = [&] {  // all that move pieces of this group's tiles
    if constexpr (kPairs) {
      __syncthreads();
    } else {
      sync_fresh_group();
    }
  };
  const auto own_unit = [&] { return fresh_block() * (blockDim.x / kGroupThreads) + group; };
  const int thread = fresh_thread();
  const int slices = kPairs ? 1 : (p.value_dim + 63) / 64;
  const int v0 = own_unit() % slices * 64;
  const int heads = p.heads * p.group;
  const std::int64_t n = own_unit() / slices / heads;
  const int query_head = static_cast<int>(own_unit() / slices % heads), head = query_head / p.group;
  const int first_head = kPairs ? query_head - group : query_head;  // of those whose rows this thread moves
  const int first_key_head = kPairs ? first_head : head;
  const int K = kPairs ? kTile : p.key_dim, V = kPairs ? kTile : p.value_dim;
  const Span span = span_of(p.sequences, n);
  int left = static_cast<int>(span.length);  // tokens from the chunk that is worked on
  // This group's sequence times heads plus query head, anew. One group a head and slice writes the states.
  const auto own_slices = [&] { return kPairs ? 1u : static_cast<unsigned>(anew(p.value_dim) + 63) / 64; };
  const auto own_head = [&] { return own_unit() / own_slices(); };
  const auto leads = [&] { return kPairs || own_head() % p.group == 0; };

  constexpr std::uint32_t g_slot = 5 * kTileBytes;
  const std::uint32_t g_tile = base + g_slot, h_tile = base + 6 * kTileBytes;
  // Where the next chunk begins in each tensor, in units of 16 bytes: an address is worked out from it and the tensor's
  // by one instruction, and it takes one register instead of two. Gates of tokens in elements.
  using Place = int;
  constexpr int unit = 16;
  const auto first_place = [&](const Strided& s, int of_head, int channel, int element = 2) {
    return static_cast<Place>((span.batch * s.batch + span.begin * s.token + of_head * s.head + channel) * element /
                              unit);
  };
  Place places[6] = {
      first_place(p.q, first_head, 0),
      first_place(p.k, first_key_head, 0),
      first_place(p.v, first_key_head, v0),
      first_place(p.o, first_head, v0),
      in_f32 ? first_place(p.g, head, 0, 4)  // each group moves its own
      : key  ? first_place(p.g, first_key_head, 0)
      : gate == FusedGate::scalar
          ? static_cast<Place>(span.batch * p.g.batch + span.begin * p.g.token + first_key_head * p.g.head)
          : 0,
      static_cast<Place>(p.state_tile(p.state_slot(span.chunk_begin, n, 0), head, 0, v0 / kTile) / unit)};
  Place &q_next = places[0], &k_next = places[1], &v_next = places[2], &o_next = places[3], &g_next = places[4],
        &states_next = places[5];
  const auto stride_of = [&](const Strided& s) { return static_cast<int>(s.token) * 2; };
  const auto step_of = [&](const Strided& s) { return static_cast<Place>(s.token * (kChunk * 2 / unit)); };
  const auto rows_at = [&](Place place, const Strided& s, int rows, int channels) {
    return Rows{static_cast<const char*>(s.data) + static_cast<std::int64_t>(place) * unit, stride_of(s), rows,
                channels};
  };
  // Of this thread's piece of its first row.
  const auto moved_offset = [&](int thread, int stride) {
    return moved_row(thread) * stride + thread % (kPairs ? 16 : 8) * 16;
  };
  const auto rows_here = [&] { return min(left, kChunk); };
  const auto rows_next = [&] { return min(left - kChunk, kChunk); };
  // A chunk to its tile `slot` bytes from the group's first.
  const auto load = [&](std::uint32_t slot, Place& next, const Strided& s, int rows, int channels) {
    const int thread = fresh_thread();
    const Rows from = rows_at(next, s, rows, channels);
    const int inside = kPairs || thread % 8 * 8 < channels ? rows - moved_row(thread) : 0;
    const char* row = from.data + moved_offset(thread, from.stride);
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {  // without bytes nothing is read
      ptx::copy_async_16(moved_base + slot + moved_piece(thread, i), row + i * from.stride, i < inside ? 16 : 0);
    }
    next += step_of(s);
  };
  // Gates of the next chunk, from where `tokens` are left; in f32 those after it are asked to the L2, and where
  // registers are few one half comes after the other.
  const auto load_gates = [&](int tokens, auto of_halves) {
    constexpr int kRows = decltype(of_halves)::value ? kTile / 2 : kTile;
    if constexpr (in_f32) {
      const int mover = fresh_shuffled();
      const auto rows_of_gates = [&](int rows) {
        Rows from = rows_at(g_next, p.g, rows, K);
        from.stride *= 2;
        g_next += 2 * step_of(p.g);
        return from;
      };
      const Rows gates = rows_of_gates(tokens);
      load_f32_gates<kRows>(g_tile, gates, 0, mover);
      if constexpr (kRows < kTile) load_f32_gates<kRows>(g_tile, gates, kRows, fresh_shuffled());
      const Place next = g_next;
      ask_for_f32_gates(rows_of_gates(tokens - kChunk), mover);
      g_next = next;
    } else {
      load(g_slot, g_next, p.g, min(tokens, kChunk), K);
    }
  };
  const auto write_states = [&](int thread) {
    store_tile_image(static_cast<char*>(p.states) + static_cast<std::int64_t>(states_next) * unit, h_tile, thread);
    // p.state_bytes() a head, of one tile of keys.
    states_next +=
        static_cast<Place>(anew(p.heads) * tiles_of(alike_shuffled<Core>(p.value_dim)) * (kImageBytes / unit));
  };
  // Of this thread's tokens of the next chunk, as scan_tokens has them. Bits as they lie in memory: what they mean is
  // worked out a chunk later, since that would wait for them.
  constexpr int kGates = kPairs ? 4 : 2;
  using RawGates = std::uint32_t[kGates];
  const auto token_gates = [&](RawGates& bits, int rows) {
    const int lane = fresh_thread() % 32, token = kGates * (kPairs ? lane % 16 : lane);
    const Place step = static_cast<Place>(p.g.token);
    const Place first = g_next + (kPairs ? lane / 16 * static_cast<Place>(p.g.head) : 0) + token * step;
    const auto read = [&]<class T>(const T* from) {
#pragma unroll
      for (int i = 0; i < kGates; ++i) bits[i] = token + i < rows ? from[i * step] : 0;
    };
    if (p.gate_dtype == DType::f32) {
      read(static_cast<const std::uint32_t*>(p.g.data) + first);
    } else {
      read(static_cast<const std::uint16_t*>(p.g.data) + first);
    }
    g_next += kChunk * step;
  };
  const auto gate_of = [&](std::uint32_t bits) { return base_2_gate(gate_from_bits(p.gate_dtype, bits)); };

  // o of a chunk, or of as many rows as are left, from its tile `slot` bytes from the group's first.
  const auto store_o = [&](std::uint32_t slot, int rows, int mover) {
    const Rows out = rows_at(o_next, p.o, min(rows, kChunk), V - v0);
    const int inside = kPairs || mover % 8 * 8 < V - v0 ? rows - moved_row(mover) : 0;
    char* to = const_cast<char*>(out.data) + moved_offset(mover, out.stride);
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      if (i < inside) {
        *reinterpret_cast<uint4*>(to + i * out.stride) = load_shared_16(moved_base + slot + moved_piece(mover, i));
      }
    }
    o_next += step_of(p.o);
  };

  const auto own_state = [&](const void* states) {
    return states == nullptr ? nullptr
                             : static_cast<float*>(const_cast<void*>(states)) +
                                   own_head() / p.group * static_cast<std::int64_t>(K) * V;
  };

  const auto token_scales = [&](const TokenSums& sums) {
    return make_float2(p.scale * ptx::exp2(sums.own.x), p.scale * ptx::exp2(sums.own.y));
  };
  float constant_gate = 0.0f, moved_constant = 0.0f;
  RawGates next_gates = {};
  if (left > 0) {
    load(0, q_next, p.q, rows_here(), K);
    load(2 * kTileBytes, k_next, p.k, rows_here(), K);
    if constexpr (key) {
      load_gates(left, std::false_type());
      ptx::copy_async_commit();
    }
    load(4 * kTileBytes, v_next, p.v, rows_here(), V - v0);
    ptx::copy_async_commit();
    if constexpr (gate == FusedGate::constant) {
      constant_gate = key_gate(p, span.batch, span.begin, head, 0);
      moved_constant = kPairs ? key_gate(p, span.batch, span.begin, first_key_head + thread / 8 % 2, 0) : constant_gate;
    }
    if constexpr (gate == FusedGate::scalar) token_gates(next_gates, rows_here());
  }

  Accumulator h;
  read_state(h, own_state(p.h0), K, V, 0, v0, thread);
  put_rounded<Core>(h_tile, h, thread);
  const bool keeps_states = p.states != nullptr && leads();
  __syncwarp();
  if (keeps_states && left > 0) write_states(thread);

  constexpr bool kAsynchronous = !std::is_same_v<Core, TensorCore80>;
  Rung rung = Rung::one_anchor;
  int c = 0;
#pragma unroll 1
  for (; left > 0; ++c, left -= kChunk) {
    const int thread = fresh_thread(), lane = thread % 32;
    const std::uint32_t parity = (c & 1) * kTileBytes, other = kTileBytes - parity;
    const std::uint32_t v_slot = 4 * kTileBytes + (key ? 0 : parity);
    const std::uint32_t q = base + parity, k = q + 2 * kTileBytes, v = base + v_slot;
    // Of pairs o of the chunk before leaves only now, by those who refill its slot.
    const auto load_next = [&] {
      if (kPairs && c > 0) store_o(other, kChunk, thread_shuffled<Core>(thread));
      if (left > kChunk) {
        load(other, q_next, p.q, rows_next(), K);
        load(2 * kTileBytes + other, k_next, p.k, rows_next(), K);
        if constexpr (!key) load(4 * kTileBytes + other, v_next, p.v, rows_next(), V - v0);
      }
      ptx::copy_async_commit();
    };
    if (kPairs && !asks_early) {
      ptx::copy_async_wait<key ? 1 : 0>();
    } else {
      if constexpr (kPairs) sync_pair(thread);
      load_next();
      ptx::copy_async_wait<key ? 2 : 1>();
    }
    const auto load_late = [&] {
      if (kPairs && !asks_early) load_next();
    };
    const auto leave_chunk = [&](Accumulator& o, float2 o_scale) {
      __syncthreads();  // the operands have been read, by both groups: they ask for the next rows together
      if constexpr (key) {
        if (left > kChunk) load(v_slot, v_next, p.v, rows_next(), V - v0);
        ptx::copy_async_commit();
      }
      const int mover = thread_shuffled<Core>(fresh_thread());
      put_rounded<Core>(h_tile, h, mover);
      scale_rows(o, o_scale.x, o_scale.y);
      put_rounded<Core>(q, o, mover);
      __syncwarp();
      if constexpr (!kPairs) store_o(parity, left, mover);
      if (keeps_states && left > kChunk && p.keeps_state_after(c)) write_states(mover);
    };

    bool one_anchor = true;
    float2 decay = make_float2(1.0f, 1.0f), o_scale = make_float2(p.scale, p.scale);
    Local<std::uint32_t, 16> steep_scores;
    if constexpr (key) {
      if (!in_f32 && p.logit_scale != 0.0f) {
        const int mover = fresh_thread(), inside = rows_here() - moved_row(mover);
#pragma unroll 1
        for (int i = 0; i < kRowsEach && i < inside; ++i) {
          turn_logits(moved_base + g_slot + moved_piece(mover, i), p.logit_scale, p.gate_min);
        }
      }
      Core::publish();
      sync_moved();  // g, q and k are there
      load_late();
      // The rung has served this group, or not. Either group of a pair refills both tiles of gates, so each waits for
      // the other: beyond.
      bool beyond;
      const auto served = [&](bool own) {
        ptx::copy_async_wait<1>();
        Core::publish();
        beyond = kPairs ? __syncthreads_or(!own) : sync_fresh_group_or(!own);
        return __any_sync(0xffffffffu, kPairs && beyond ? sync_fresh_group_or(!own) : beyond) == 0;
      };
      const auto refill_gates = [&](auto in_halves) {
        if (kPairs && beyond) __syncthreads();
        if (left > kChunk) load_gates(left - kChunk, in_halves);
        ptx::copy_async_commit();
      };
      if (kAsynchronous && rung == Rung::anchors) {
        if constexpr (kAsynchronous) {
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
        one_anchor = served(rung == Rung::one_anchor && gate_by_channel<Core>(q, k, g_tile, decay, thread));
      }
      const auto reload = [&] {
        const auto again = [&](Place next, const Strided& s, int chunks_back) {
          const Place own = kPairs ? group * (kTile * 2 / unit) : 0;
          return rows_at(next + own - step_of(s) * chunks_back, s, rows_here(), K);
        };
        const int ahead = left > kChunk ? 2 : 1;
        load_tile(q, again(q_next, p.q, ahead), fresh_thread());
        load_tile(k, again(k_next, p.k, ahead), fresh_thread());
        ptx::copy_async_commit();
        ptx::copy_async_wait<0>();
        __syncwarp();  // a warp reads what it has loaded
      };
      if constexpr (kAsynchronous) {
        if (!one_anchor) {
          if (rung == Rung::one_anchor) reload();
          Local<Place, 6> walk;  // registers are for the products
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
      if (!one_anchor) {
        Local<float, 32> state;
        Local<Place, 6> walk;
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
              const bool one_reaches = __all_sync(0xffffffffu, sum.x >= -kRange && sum.y >= -kRange) != 0,
                         near = __all_sync(0xffffffffu, each_near) != 0;
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
      refill_gates(std::false_type());
    } else if constexpr (by_token) {
      float gates[kGates];
#pragma unroll
      for (int i = 0; i < kGates; ++i) gates[i] = gate_of(next_gates[i]);
      if constexpr (gate == FusedGate::scalar) token_gates(next_gates, left > kChunk ? rows_next() : 0);
      const TokenSums sums = gate == FusedGate::constant
                                 ? constant_sums(constant_gate, moved_constant, moved_row(thread), rows_here(), thread)
                                 : scan_tokens(gates, group, thread);
      one_anchor = sums.total >= -kRange;
      decay.x = decay.y = ptx::exp2(sums.total);
      const auto gate_steeply = [&] {
        Local<float, 32> state;
        Local<Place, 6> walk;
        state.put(h);
        walk.put(places);
        if constexpr (gate == FusedGate::constant) {
          const float each = alike_shuffled<Core>(constant_gate);
          gate_steep_tokens(steep_scores, q, k,
                            make_float2(2 * lane < left ? each : 0.0f, 2 * lane + 1 < left ? each : 0.0f),
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
      };
      const auto gate_moved_values = [&] {
        gate_values(
            moved_base + v_slot, [&](int i) { return moved_piece(thread, i); }, sums);
      };
      if constexpr (kPairs) {  // each head's decision is its own
        if (one_anchor) o_scale = token_scales(sums);
        if (sums.moved_total >= -kRange) gate_moved_values();
        Core::publish();
        __syncthreads();  // the operands are there
        load_late();
        if (!one_anchor) {
          gate_steeply();
          Core::publish();
          sync_fresh_group();
        }
      } else {
        if (one_anchor) {
          o_scale = token_scales(sums);
          gate_moved_values();
        } else {
          gate_steeply();
        }
        Core::publish();
        sync_fresh_group();
      }
    } else {
      Core::publish();
      sync_moved();
      load_late();
    }

    // h is both the operand in its tile and, in registers, what the next one comes from.
    if (!one_anchor) scale_rows(h, decay.x, decay.y);
    Accumulator s;
    std::uint32_t scores[16];
    Core::begin(h);
    Core::template product<k_inner, k_inner, true, kLoads>(s, q, k, thread_shuffled<Core>(thread));
    Core::commit();
    const auto step_state = [&] {
      Core::template product<k_outer, k_outer, false, kLoads>(h, k, v, thread_shuffled<Core>(thread));
    };
    const auto decay_state = [&] {
      if constexpr (gate == FusedGate::constant) {  // worked out anew rather than held
        const float each = alike_shuffled<Core>(constant_gate);
        const TokenSums sums =
            constant_sums(each, each, 0, min(alike_shuffled<Core>(left), kChunk), thread_shuffled<Core>(thread));
        decay.x = decay.y = ptx::exp2(sums.total);
        o_scale = one_anchor ? token_scales(sums) : make_float2(p.scale, p.scale);
      }
      if (one_anchor) scale_rows(h, decay.x, decay.y);
    };
    // With wgmma the state is stepped while scores are selected; with mma.sync before there is an accumulator of o.
    if constexpr (kAsynchronous) step_state();
    Core::commit();
    Core::template wait<1>(s);
    select_pairs<false>(scores, s, thread);
    if (!one_anchor) steep_scores.get(scores);
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
  if (kPairs && c > 0) {
    const int mover = fresh_thread();
    sync_pair(mover);
    store_o((c - 1) % 2 * kTileBytes, left + kChunk, mover);
  }
  if (p.ht != nullptr && leads()) {
    write_state(own_state(p.ht), h, K, V, 0, static_cast<int>(own_unit() % own_slices()) * 64, fresh_thread());
  }
}

template <class Core, FusedGate gate, bool kPairs>
__global__ void __launch_bounds__(2 * kGroupThreads, 2)
    fused_kernel(const __grid_constant__ Params p, bool asks_early) {
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Core::available) fused<Core, gate, kPairs>(p, asks_early, shared);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
