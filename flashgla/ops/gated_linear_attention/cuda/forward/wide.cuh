// Forward in one pass for heads of up to 128 key channels and any value channels, on Hopper: a block walks through one
// (sequence, query head, slice of 64 or 128 value channels), with groups of 128 threads of two kinds.
//
// Two groups gate. Nothing they do depends on the state, so they run ahead of those that hold it, in turns, a step of
// one key tile each: they ask TMA for q, k and gates (tiles/row_maps.h) and make, in their place,
//     q~ = q 2^G     k~ = k 2^-G     P^T_ji = k~_j q~_i where i >= j, else 0     and 2^B, B: G at the chunk's end
// (forward/gates.cuh; beyond one anchor's reach k~ = k 2^(B - G), the state decays before what is added to it instead
// of after, and P comes by blocks, tiles/ladder.cuh).
//
// The others hold the state of 64 value channels each, transposed as in forward/recurrence.cuh, ask for v, and take
// steps in order:
//     o^T = scale sum over key tiles (h^T q~^T + v^T P^T)     h^T = (h^T + v^T k~) 2^B
// The scores are those of the step's key tile alone, so that the groups that gate never wait for each other.
// Who does what in a step, and peers, blocks that gate for each other: WIDE.md.
#pragma once

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/forward/gates.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/tiles/row_maps.h"

namespace flashgla::ops::gated_linear_attention::cuda {

constexpr int kGatingGroups = 2;
constexpr int kProducerWarps = 3;  // of each: one for q, one for k, one for gates

// Where a block is in the call: the same for all threads, in shared memory, since registers are scarce.
struct WidePlaces {
  // Of the sequence's first token and the head's first channel (of o the slice's), from the tensors' beginnings.
  std::int64_t q, k, g, o;  // bytes
  std::int64_t state;       // of the key-value head, elements
  int length;               // of the sequence
  int v0;                   // the slice's first channel
  int begin, batch;         // the sequence's first token and its row of the batch
  int query_head, head;
};

struct WideMaps {
  RowMap q, k, g, v, o;
};

// Where a step's tiles are, and the parity of its use of the barriers there.
struct WidePlace {
  int slot, parity;
};

// KB: key tiles; groups: of those that hold the state; peers: blocks that gate for each other.
template <int KB, int groups, int peers>
struct WidePlan {
  static_assert(peers == 1 || (peers == 2 && KB == 2));
  static constexpr int own_tiles = KB / peers;  // of a chunk's key tiles, those gated here
  // Chunks that there is room for: of steps gated here, of those that a peer gates, and of v.
  static constexpr int own_chunks = peers > 1 ? 5 : 6 / KB, peer_chunks = 2, value_chunks = 2;
  static constexpr int own_slots = own_chunks * own_tiles, slots = own_slots + (peers - 1) * peer_chunks;
  // A step's slot: q~, k~, P^T (where it is gated, q, k and gates were there), the state's decay 2^B as 64 floats and
  // whether it decays before what is added to it. A peer is given as much; then B.
  static constexpr int decay_in_slot = 3 * kTileBytes, is_before_in_slot = decay_in_slot + kTile * 4,
                       given_bytes = is_before_in_slot + 16, slot_bytes = decay_in_slot + 1024;
  // [slots], then tiles: v [chunks][groups], o [groups].
  static constexpr int v = slots * slot_bytes, out = v + value_chunks * groups * kTileBytes;
  // mbarriers: what has been asked for is there [own_slots], the step can be taken [slots], it has been, by peers too,
  // and the slot is free [own_slots], v is there [groups][chunks].
  static constexpr int inputs_full = out + groups * kTileBytes, step_full = inputs_full + own_slots * 8,
                       slot_empty = step_full + slots * 8, v_full = slot_empty + own_slots * 8,
                       places = v_full + groups * value_chunks * 8,
                       bytes = places + static_cast<int>(sizeof(WidePlaces));
  static constexpr int threads = (groups + kGatingGroups) * kGroupThreads;
  // A thread's registers: what each begins with, and after the groups that gate have given some of theirs away.
  static constexpr int gating_registers = groups == 1 ? 128
                                          : KB == 1   ? 120
                                                      : 96,
                       state_registers = groups == 1 ? 232
                                         : KB == 1   ? 136
                                                     : 160;

  // Of a chunk's step `order`, in the order in which this block takes them: key tile by key tile, its own first.
  static __device__ __forceinline__ WidePlace place_of(int chunk, int order) {
    const bool own = order < own_tiles;
    const unsigned room = own ? own_chunks : peer_chunks, at = static_cast<unsigned>(anew(chunk));
    return {static_cast<int>(own ? at % room * own_tiles + order : own_slots + at % room),
            static_cast<int>(at / room % 2)};
  }
  // The block among its peers, and the key tile of its steps of that order.
  static __device__ __forceinline__ int rank() { return static_cast<int>(fresh_block() % peers); }
  static __device__ __forceinline__ int key_tile(int order) { return peers == 1 ? order : order ^ rank(); }
};

// Zeros in a tile's rows from `rows` on. By a group.
__device__ __forceinline__ void clear_rows(std::uint32_t tile, int rows) {
  for (int i = fresh_thread(); i < kTileBytes / 16; i += kGroupThreads) {
    if (i / 8 >= rows) store_shared_16(tile + 16 * i, make_uint4(0, 0, 0, 0));
  }
}

// All steps of one of the groups that gate: those of one key tile, or every second chunk where the block gates but one.
template <class Core, int KB, int groups, int peers, GatesAs kGates>
__device__ __forceinline__ void gate_steps(const Params& p, const WideMaps& maps, char* shared) {
  using Plan = WidePlan<KB, groups, peers>;
  constexpr int kChunkStep = kGatingGroups / Plan::own_tiles;
  constexpr int kAhead = 2;                               // steps of the group that are asked for while it is at one
  static_assert(Plan::own_chunks > kAhead * kChunkStep);  // or it would wait for what it has just handed over
  const std::uint32_t base = ptx::shared_address(shared);
  const volatile WidePlaces& at = *reinterpret_cast<const volatile WidePlaces*>(shared + Plan::places);
  const auto place_of = [](int chunk) { return Plan::place_of(chunk, kChunkStep == 1 ? fresh_group() - groups : 0); };
  const int first_chunk = kChunkStep == 1 ? 0 : own_group() - groups;
  const auto chunks = [&] { return (at.length + kChunk - 1) / kChunk; };  // read again: registers are scarce
  constexpr bool kTokens = kGates == GatesAs::tokens, kF32Gates = kGates == GatesAs::f32;
  const bool by_token = kTokens && p.gate != GateKind::none;
  const auto find_channel = [&] { return Plan::key_tile(kChunkStep == 1 ? fresh_group() - groups : 0) * kTile; };
  const auto images_of = [&](int slot) { return base + slot * Plan::slot_bytes; };
  const auto f32_gates_of = [&](int chunk) {
    const int stride = static_cast<int>(p.g.token) * 4, channel = find_channel();
    return Rows{
        static_cast<const char*>(p.g.data) + at.g + static_cast<std::int64_t>(chunk) * (stride * kChunk) + 4 * channel,
        stride, min(at.length - chunk * kChunk, kTile), p.key_dim - channel};
  };

  float next_gate = 0.0f;  // of one gate a token: this thread's token of the group's next step
  const auto fetch_gate = [&](int chunk) {
    const int token = chunk * kChunk + fresh_thread();
    if (by_token && fresh_thread() < kTile) {
      const void* gates = static_cast<const char*>(p.g.data) + at.g;
      next_gate = token < at.length ? base_2_gate(load_as(p.gate_dtype, gates, token * p.g.token)) : 0.0f;
    }
  };
  // A thread of each producer warp, for one kind of tiles: one for all of them would be what the group waits for.
  const auto ask_for = [&](int chunk) {
    const int warp = fresh_thread() / 32;
    if (chunk < chunks() && warp < kProducerWarps && fresh_thread() % 32 == 0) {
      const WidePlace place = place_of(chunk);
      const std::uint32_t barrier = base + Plan::inputs_full + 8 * place.slot;
      // What was there has been taken. Also where nothing is asked for: the other group may be a turn of the slots
      // ahead.
      Core::wait_at(base + Plan::slot_empty + 8 * place.slot, place.parity ^ 1);
      if (warp == 2 && (kF32Gates || kTokens)) {
        Core::arrive(barrier);
      } else {
        Core::expect_bytes(barrier, kTileBytes);
        const RowMap& of = warp == 0 ? maps.q : warp == 1 ? maps.k : maps.g;
        Core::copy_box(images_of(place.slot) + warp * kTileBytes, &of.map, find_channel(), at.begin + chunk * kChunk,
                       (warp == 0 ? at.query_head : at.head) * of.head_step, at.batch * of.batch_step, barrier);
      }
    }
    __syncwarp();
    if constexpr (kF32Gates) {
      if (chunk < chunks()) ask_for_f32_gates(f32_gates_of(chunk), fresh_thread());
    }
  };
  // What this group has handed over of a chunk, to the peer. By a thread of the warp that asks for nothing.
  const auto give = [&](int chunk) {
    if (fresh_thread() == kGroupThreads - 32) {
      const WidePlace from = Plan::place_of(chunk, 0), to = Plan::place_of(chunk, 1);
      Core::wait_at(base + Plan::step_full + 8 * from.slot, from.parity);
      if (chunk >= Plan::peer_chunks) {  // what was there has been taken
        const WidePlace before = Plan::place_of(chunk - Plan::peer_chunks, 0);
        Core::wait_at(base + Plan::slot_empty + 8 * before.slot, before.parity);
      }
      const int peer = Plan::rank() ^ 1;
      const std::uint32_t barrier = Core::there(base + Plan::step_full + 8 * to.slot, peer);
      Core::expect_bytes_there(barrier, Plan::given_bytes);
      Core::copy_there(Core::there(images_of(to.slot), peer), images_of(from.slot), Plan::given_bytes, barrier);
    }
    __syncwarp();
  };

#pragma unroll 1
  for (int i = 0; i < kAhead; ++i) ask_for(first_chunk + kChunkStep * i);
  fetch_gate(first_chunk);
  if constexpr (peers > 1) Core::wait_for_cluster();
  // Waits for a step's tiles, and readies them. has_gates: those of f32 have been put (finish_near).
  const auto await = [&](int chunk, bool has_gates) {
    const WidePlace place = place_of(chunk);
    const std::uint32_t q_tile = images_of(place.slot), k_tile = q_tile + kTileBytes, g_tile = k_tile + kTileBytes;
    if (by_token) {  // by the warps that asked for q and k, and so know that the slot has been read
      if (fresh_thread() < kTile) store_shared_4(g_tile + 4 * fresh_thread(), __float_as_uint(next_gate));
      fetch_gate(chunk + kChunkStep);
    }
    const auto wait_for_inputs = [&] { Core::wait_at(base + Plan::inputs_full + 8 * place.slot, place.parity); };
    if (kF32Gates && !has_gates) {
      F32Gates gates;
      gates.load(f32_gates_of(chunk), fresh_thread());
      wait_for_inputs();
      gates.put(g_tile, fresh_thread());
      Core::publish();
    } else {
      wait_for_inputs();
    }
    const int rows = at.length - chunk * kChunk;
    if (rows < kTile) {  // what lies beyond a sequence may be another one's
      clear_rows(q_tile, rows);
      clear_rows(k_tile, rows);
      if (!kTokens) clear_rows(g_tile, rows);
      Core::publish();
    }
    if constexpr (kGates == GatesAs::logits) {
      if (rows < kTile) sync_fresh_group();
      turn_tile_of_logits(g_tile, rows, p, fresh_thread());
      Core::publish();
      sync_fresh_group();
    } else if (by_token || rows < kTile || kF32Gates) {
      sync_fresh_group();
    }
  };
  const auto decays_of = [&](int chunk) {
    return reinterpret_cast<float*>(shared + place_of(chunk).slot * Plan::slot_bytes + Plan::decay_in_slot);
  };
  const auto put_decay = [&](int chunk, float2 sum, bool before) {  // of the lane's two channels, which all warps have
    const int thread = fresh_thread();
    if (thread >= 32) return;
    float* const decays = decays_of(chunk);
    *reinterpret_cast<float2*>(decays + 2 * thread) = make_float2(ptx::exp2(sum.x), ptx::exp2(sum.y));
    if (thread == 0) *reinterpret_cast<int*>(decays + kTile) = before;
  };
  const auto hand_over = [&](int chunk) {
    Core::publish();
    Core::arrive(base + Plan::step_full + 8 * place_of(chunk).slot);
    if constexpr (peers > 1) give(chunk);
  };
  // q~ and k~ as if one anchor reached, and the lane's two channels' sums; whether it does.
  const auto gate = [&](int chunk, float2& two_totals) {
    const std::uint32_t q_tile = images_of(place_of(chunk).slot), k_tile = q_tile + kTileBytes,
                        last_tile = k_tile + kTileBytes;
    float* const totals = decays_of(chunk) + 2 * kTile;
    Accumulator sums;  // of key gates as loaded
    if constexpr (!kTokens) {
      std::uint32_t ones[16];
      triangle_of_ones<Triangle::lower>(ones, fresh_thread());
      Core::begin(ones);
      Core::template product<Stored::k_outer, true>(sums, ones, last_tile, fresh_thread());
      Core::finish(sums);
    }
    const int thread = fresh_thread(), column = 2 * (thread % 4);
    constexpr float to_base_2 = kTokens ? 1.0f : kLog2E;
    if constexpr (kTokens) by_token ? sum_tokens(sums, last_tile, thread) : clear(sums);
    if (thread >= kGroupThreads - 4) {  // they have the chunk's last token
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        *reinterpret_cast<float2*>(totals + 8 * j + column) =
            make_float2(to_base_2 * sums[4 * j + 2], to_base_2 * sums[4 * j + 3]);
      }
    }
    gate_by_sums<Core>(q_tile, k_tile, sums, to_base_2, thread);
    Core::publish();
    sync_fresh_group();  // and tells whether it did
    two_totals = *reinterpret_cast<const float2*>(totals + 2 * (thread % 32));
    return one_anchor_reaches(two_totals);
  };
  // next: this group's next step, whose gates of f32 are read when this one has been handed over, and put; 0: none.
  const auto finish_near = [&](int chunk, float2 two_totals, int next) {
    put_decay(chunk, two_totals, false);
    const std::uint32_t q_tile = images_of(place_of(chunk).slot), k_tile = q_tile + kTileBytes;
    Accumulator scores;
    Core::begin();
    Core::template product<Stored::k_inner, Stored::k_inner, true>(scores, k_tile, q_tile, fresh_thread());
    Core::finish(scores);
    std::uint32_t pairs[16];
    select_pairs<true>(pairs, scores, fresh_thread());
    put_operand<Core>(images_of(place_of(chunk).slot) + 2 * kTileBytes, pairs, fresh_thread());
    hand_over(chunk);
    F32Gates gates;
    const bool has_next = kF32Gates && next > 0 && next < chunks();
    if (has_next) gates.load(f32_gates_of(next), fresh_thread());
    ask_for(chunk + kAhead * kChunkStep);
    if (has_next) {  // its slot is free: q and k have been asked for a step ago
      gates.put(images_of(place_of(next).slot) + 2 * kTileBytes, fresh_thread());
      Core::publish();
    }
  };
  const auto load_again = [&](int chunk) {  // q and k
    const auto load = [&](std::uint32_t tile, std::int64_t first, const Strided& s) {
      const int stride = static_cast<int>(s.token) * 2, channel = find_channel();
      const auto at_chunk = static_cast<std::int64_t>(chunk) * (stride * kChunk) + 2 * channel;
      load_tile(tile,
                Rows{static_cast<const char*>(s.data) + first + at_chunk, stride,
                     min(at.length - chunk * kChunk, kTile), p.key_dim - channel},
                fresh_thread());
    };
    const std::uint32_t q_tile = images_of(place_of(chunk).slot);
    load(q_tile, at.q, p.q);
    load(q_tile + kTileBytes, at.k, p.k);
    ptx::copy_async_commit();
    ptx::copy_async_wait<0>();
    __syncwarp();  // a warp reads what it has loaded
  };
  // By blocks; whether one anchor would have reached. There is no register for the chunk's number.
  const auto finish_by_blocks = [&](int& chunk) {
    Local<int, 1> number;
    number.x[0] = chunk;
    bool would_reach = false;
    Accumulator scores;
    clear(scores);
    const std::uint32_t q_tile = anew(static_cast<int>(images_of(place_of(chunk).slot))), k_tile = q_tile + kTileBytes,
                        last_tile = k_tile + kTileBytes;
    gate_by_blocks<Core, KB == 2 && groups == 2, true>(
        scores, q_tile, k_tile, last_tile, 1.0f,
        [&](Accumulator& sums, int thread) {
          if constexpr (kTokens) {
            sum_block_of(sums, thread, [&](int row, int) {
              const float gate = __uint_as_float(load_shared_4(last_tile + 4 * row));
              return make_float2(gate, gate);
            });
          } else {
            sum_block(sums, last_tile, thread);
          }
        },
        [&](float2 sum, bool) {
          put_decay(number.x[0], sum, true);
          would_reach = one_anchor_reaches(sum);
        });
    std::uint32_t pairs[16];
    select_pairs<false>(pairs, scores, fresh_thread());
    sync_fresh_group();  // what lay in the scores' place has been read
    chunk = number.x[0];
    put_operand<Core, true>(images_of(place_of(chunk).slot) + 2 * kTileBytes, pairs, fresh_thread());
    hand_over(chunk);
    ask_for(chunk + kAhead * kChunkStep);
    return would_reach;
  };

  // While one anchor reaches: a loop of its own, for what the other way costs is to be in the same one.
  int chunk = first_chunk;
  if (kF32Gates && chunk < chunks()) {
    F32Gates gates;
    gates.load(f32_gates_of(chunk), fresh_thread());
    gates.put(images_of(place_of(chunk).slot) + 2 * kTileBytes, fresh_thread());
    Core::publish();
  }
#pragma unroll 1
  for (;; chunk += kChunkStep) {
    if (chunk >= chunks()) return;
    await(chunk, true);
    float2 totals;
    if (!gate(chunk, totals)) break;
    finish_near(chunk, totals, chunk + kChunkStep);
  }
  // Then one anchor is tried where it would have reached in the group's step before.
  bool is_gated = true, may_reach = true;
#pragma unroll 1
  for (; chunk < chunks(); chunk += kChunkStep) {
    if (!is_gated) await(chunk, false);
    if (may_reach) {
      float2 totals;
      if (!is_gated && gate(chunk, totals)) {
        finish_near(chunk, totals, 0);
        continue;
      }
      load_again(chunk);
    }
    is_gated = false;
    may_reach = finish_by_blocks(chunk);
  }
}

// All steps, and the state, of one of the groups that hold it.
template <class Core, int KB, int groups, int peers>
__device__ __forceinline__ void hold_state(const Params& p, const WideMaps& maps, char* shared) {
  using Plan = WidePlan<KB, groups, peers>;
  const std::uint32_t base = ptx::shared_address(shared);
  const int part = own_group();
  const volatile WidePlaces& at = *reinterpret_cast<const volatile WidePlaces*>(shared + Plan::places);
  const auto find_v0 = [&] { return at.v0 + part * kTile; };
  const int chunks = (at.length + kChunk - 1) / kChunk;
  const auto v_tile_of = [&](int chunk) {
    return base + Plan::v + (chunk % Plan::value_chunks * groups + part) * kTileBytes;
  };
  const auto v_full_of = [&](int chunk) {
    return base + Plan::v_full + 8 * (part * Plan::value_chunks + chunk % Plan::value_chunks);
  };
  const auto ask_for_v = [&](int chunk) {
    if (chunk < chunks) {
      Core::expect_bytes(v_full_of(chunk), kTileBytes);
      Core::copy_box(v_tile_of(chunk), &maps.v.map, find_v0(), at.begin + chunk * kChunk, at.head * maps.v.head_step,
                     at.batch * maps.v.batch_step, v_full_of(chunk));
    }
  };
  if (fresh_thread() == 0 && chunks > 0) {
    Core::wait_at(base + Plan::inputs_full, 0);  // what the groups that gate begin with goes first
#pragma unroll 1
    for (int i = 0; i < Plan::value_chunks; ++i) ask_for_v(i);
  }
  if constexpr (peers > 1) Core::wait_for_cluster();
  Accumulator h[KB];
#pragma unroll
  for (int i = 0; i < KB; ++i) {
    clear(h[i]);
    if (p.h0 != nullptr) {
      auto* given = static_cast<float*>(const_cast<void*>(p.h0)) + at.state;
      move_transposed_state<false>(h[i], given, p.key_dim, p.value_dim, kTile * Plan::key_tile(i), find_v0(),
                                   fresh_thread());
    }
  }

  const std::uint32_t out_tile = base + Plan::out + part * kTileBytes;
  const auto decay = [&](Accumulator& h, int slot) {
    const char* from = shared + slot * Plan::slot_bytes + Plan::decay_in_slot + 8 * (fresh_thread() % 4);
    float2 factors[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) factors[j] = *reinterpret_cast<const float2*>(from + 32 * j);
    scale_columns(h, factors);
  };
  const auto finish_step = [&](Accumulator& h, bool has_decayed, int chunk, int order) {
    if (!has_decayed) decay(h, Plan::place_of(chunk, order).slot);
    if (order < Plan::own_tiles) {
      Core::arrive(base + Plan::slot_empty + 8 * Plan::place_of(chunk, order).slot);
    } else if (chunk + Plan::peer_chunks < chunks) {  // what nobody waits for could come after the peer's end
      __syncwarp();
      if (fresh_thread() % 32 == 0) {
        Core::arrive_there(Core::there(base + Plan::slot_empty + 8 * Plan::place_of(chunk, 0).slot, Plan::rank() ^ 1));
      }
    }
  };
  // o of a chunk leaves beside the next one's products: to its tile beside those of the first step, to memory beside
  // those of the last.
  std::uint32_t leaving[16];
  const auto put_out = [&] {
    if (fresh_thread() == 0) Core::wait_for_copies_out();
    sync_group();  // o of the chunk before has been read
    put_operand<Core, true>(out_tile, leaving, fresh_thread());
    Core::publish();
  };
  const auto copy_out = [&](int chunk) {
    Core::copy_box_out(&maps.o.map, find_v0(), at.begin + chunk * kChunk, at.query_head * maps.o.head_step,
                       at.batch * maps.o.batch_step, out_tile);
    Core::commit_copies_out();
  };
#pragma unroll 1
  for (int c = 0; c < chunks; ++c) {
    const int thread = fresh_thread(), rows = min(at.length - c * kChunk, kChunk);
    Accumulator o;
    std::uint32_t v[16];
    bool has_decayed[KB];
    Core::wait_at(v_full_of(c), c / Plan::value_chunks % 2);
    if (rows < kChunk) {  // what lies beyond a sequence may be another one's
      clear_rows(v_tile_of(c), rows);
      sync_group();
    }
    load_operand<Stored::k_outer>(v, v_tile_of(c), thread);
    Core::begin(v);
#pragma unroll
    for (int i = 0; i < KB; ++i) {
      const WidePlace place = Plan::place_of(c, i);
      Core::wait_at(base + Plan::step_full + 8 * place.slot, place.parity);
      const std::uint32_t q = base + place.slot * Plan::slot_bytes, k = q + kTileBytes, scores = k + kTileBytes;
      std::uint32_t rounded[16];
      to_operand(rounded, h[i]);
      has_decayed[i] =
          *reinterpret_cast<const int*>(shared + place.slot * Plan::slot_bytes + Plan::is_before_in_slot) != 0;
      if (has_decayed[i]) decay(h[i], place.slot);
      Core::begin(rounded, h[i]);
      i == 0 ? Core::template product<Stored::k_inner, true>(o, rounded, q, thread)
             : Core::template product<Stored::k_inner>(o, rounded, q, thread);
      // All but the last are waited for until what was rounded is free again, the last until o is there.
      if (i + 1 < KB) Core::commit();
      Core::template product<Stored::k_outer>(o, v, scores, thread);
      if (i + 1 == KB) Core::commit();
      Core::template product<Stored::k_outer>(h[i], v, k, thread);
      Core::commit();
      if (i == 0 && c > 0) put_out();
      if (i + 1 < KB) Core::template wait<1>();
    }
    sync_group();  // the chunk's v has been read, and o of the one before put
    if (fresh_thread() == 0) {
      if (c > 0) copy_out(c - 1);
      ask_for_v(c + Plan::value_chunks);
    }
    Core::template wait<1>(o);
    if constexpr (KB > 1) {
      Core::template wait<1>(h[0]);
      finish_step(h[0], has_decayed[0], c, 0);
    }
    scale_rows(o, p.scale, p.scale);
    to_operand(leaving, o);
    Core::template wait<0>(v, h[0], h[KB - 1]);
    finish_step(h[KB - 1], has_decayed[KB - 1], c, KB - 1);
  }
  if (chunks > 0) {
    const int last = chunks - 1, rows = at.length - last * kChunk;
    put_out();
    sync_group();
    if (rows < kChunk) {  // what lies beyond a sequence may be another one's
      const int stride = static_cast<int>(p.o.token) * 2;
      store_tile(Rows{static_cast<const char*>(p.o.data) + at.o + static_cast<std::int64_t>(last) * (stride * kChunk) +
                          2 * part * kTile,
                      stride, rows, p.value_dim - at.v0 - part * kTile},
                 out_tile, fresh_thread());
    } else if (fresh_thread() == 0) {
      copy_out(last);
    }
  }
  if (fresh_thread() == 0) Core::wait_for_copies_out();
  if (p.ht == nullptr || at.query_head % p.group != 0) return;
  float* const wanted = static_cast<float*>(p.ht) + at.state;
#pragma unroll
  for (int i = 0; i < KB; ++i) {
    move_transposed_state<true>(h[i], wanted, p.key_dim, p.value_dim, kTile * Plan::key_tile(i), find_v0(),
                                fresh_thread());
  }
}

// Grid: N * H * ceil(V / (64 groups)), value slices fastest; clusters of `peers`.
template <class Core, int KB, int groups, int peers, GatesAs kGates>
__device__ __forceinline__ void wide_forward(const Params& p, const WideMaps& maps, char* shared) {
  using Plan = WidePlan<KB, groups, peers>;
  const std::uint32_t base = ptx::shared_address(shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Plan::own_slots; ++i) {
      Core::init_barrier(base + Plan::inputs_full + 8 * i, kProducerWarps);
      Core::init_barrier(base + Plan::step_full + 8 * i, kGroupThreads);
      // All threads of this block's groups, and one of each warp of a peer's.
      Core::init_barrier(base + Plan::slot_empty + 8 * i,
                         groups * (kGroupThreads + (peers - 1) * (kGroupThreads / 32)));
    }
    for (int i = Plan::own_slots; i < Plan::slots; ++i) Core::init_barrier(base + Plan::step_full + 8 * i, 1);
    for (int i = 0; i < groups * Plan::value_chunks; ++i) Core::init_barrier(base + Plan::v_full + 8 * i, 1);
    Core::publish_barriers();
    const int slices = (p.value_dim + 64 * groups - 1) / (64 * groups), v0 = blockIdx.x % slices * 64 * groups;
    const int query_head = blockIdx.x / slices % (p.heads * p.group), head = query_head / p.group;
    const std::int64_t n = blockIdx.x / slices / (p.heads * p.group);
    const Span span = span_of(p.sequences, n);
    const auto first = [&](const Strided& s, int element, int of_head, int channel) {
      return (span.batch * s.batch + span.begin * s.token + of_head * s.head + channel) * element;
    };
    *reinterpret_cast<WidePlaces*>(shared + Plan::places) = {
        first(p.q, 2, query_head, 0),
        first(p.k, 2, head, 0),
        first(p.g, p.gate_dtype == DType::f32 ? 4 : 2, head, 0),
        first(p.o, 2, query_head, v0),
        (n * p.heads + head) * (static_cast<std::int64_t>(p.key_dim) * p.value_dim),
        static_cast<int>(span.length),
        v0,
        static_cast<int>(span.begin),
        static_cast<int>(span.batch),
        query_head,
        head};
  }
  __syncthreads();
  if constexpr (peers > 1) Core::arrive_at_cluster();  // each waits before it reaches for the peer
  if (own_group() >= groups) {
    Core::template give<Plan::gating_registers>();
    gate_steps<Core, KB, groups, peers, kGates>(p, maps, shared);
  } else {
    Core::template take<Plan::state_registers>();
    hold_state<Core, KB, groups, peers>(p, maps, shared);
  }
  if constexpr (peers > 1) {  // a block's shared memory is there until its peer is done with it
    Core::arrive_at_cluster();
    Core::wait_for_cluster();
  }
}

template <class Core, int KB, int groups, int peers, GatesAs kGates>
__global__ void __launch_bounds__((WidePlan<KB, groups, peers>::threads), 1)
    wide_forward_kernel(const __grid_constant__ Params p, const __grid_constant__ WideMaps maps) {
  flashgla::cuda::wait_for_previous();
  release_other_way(p.sequences);
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Core::available) wide_forward<Core, KB, groups, peers, kGates>(p, maps, shared);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
