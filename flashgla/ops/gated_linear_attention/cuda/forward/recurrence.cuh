// Second pass after prepare.cuh: the recurrence over chunks, free of gates, with the state of one (sequence, head,
// segment of time) and 64 value channels for each group of 128 threads in registers; two groups share images. Forwards
//     o = q~ h + P v,        h' = 2^sum h + k~^T v,
// and backwards in time, dh the gradient of the state after a chunk, the same with other names:
//     dv = k~ dh + P^T do,   dh' = 2^sum dh + q~^T do.
// Segments: where sequences, heads and slices do not fill the card, time is cut, and this kernel runs from start states
// that segments.cuh has found.
//
// The state is held transposed, a row a value channel: rounded, it is the operand of o^T = h^T q~^T + v^T P^T as it
// lies in registers, and so is v^T of h'^T = h^T 2^sum + v^T k~, read once a chunk. What shared memory gives the tensor
// cores is images alone. They come by steps of one key tile, q~ and k~ together, in a ring of slots; on Hopper warps of
// their own bring images and v, and take outputs and kept states away.
#pragma once

#include <type_traits>

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/estimates.h"
#include "flashgla/ops/gated_linear_attention/cuda/forward/place_in_time.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/forward/prepare.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/forward/state.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/forward/two_pass.h"
#include "flashgla/ops/gated_linear_attention/cuda/tiles/rows_by_warp.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// Tiles of shared memory, in this order; then bytes. grouped, plain: as recurrence().
template <class Core, int KB, int groups, bool outputs, bool grouped, bool plain>
struct RecurrencePlan {
  static constexpr bool in_bulk = std::is_same_v<Core, TensorCore90>;
  static constexpr int blocks = recurrence_blocks(KB, groups);
  // Where there is only the state to make, a slot has all key tiles of a chunk: a barrier a chunk.
  static constexpr bool by_chunk = in_bulk && !outputs && !grouped;
  static constexpr int slot = outputs ? 2 : by_chunk ? KB : 1;  // tiles: of each key tile q~ and k~, or k~
  // P, and without warps that load v too, have two slots and no barriers of their own: there slots <= 2 KB.
  static constexpr int most_slots = KB == 1 ? 2 : !in_bulk || blocks > 1 ? 3 : KB == 2 ? 4 : 6;
  static constexpr int slots = by_chunk ? 2 * most_slots / KB : in_bulk && !outputs ? 2 * most_slots : most_slots;
  static constexpr int v_slots = by_chunk ? 3 : 2;
  static constexpr int images = 0;                      // [slots][slot]
  static constexpr int scores = images + slots * slot;  // [2]
  static constexpr int v = scores + (outputs ? 2 : 0);  // [v_slots][groups]
  static constexpr int out = v + v_slots * groups;      // [groups]
  // [groups][KB], or the tile of the output
  static constexpr int states = in_bulk && outputs ? out + groups : out;
  static constexpr int decays = (in_bulk ? states + groups * KB : out + groups) * kTileBytes;
  // [slots], of a slot's key tiles 64 floats each; then barriers: of slots, of v [v_slots], of what leaves [groups].
  static constexpr int decay_bytes = plain ? 0 : (by_chunk ? KB : 1) * kTile * 4;
  static constexpr int filled = decays + slots * decay_bytes;
  static constexpr int emptied = filled + (slots + v_slots + groups) * 8;
  static constexpr int bytes = emptied + (slots + v_slots + groups) * 8;
  // The warps that load and store are a group, which can give registers away, where the others need more than their
  // share.
  static constexpr bool gives_registers = in_bulk && (groups == 2 ? KB >= 2 : KB <= 2);
  static constexpr int given = groups == 1 && KB == 1 ? 72 : 56, taken = groups == 2 ? 224 : 256 - given;
  static constexpr int threads = groups * kGroupThreads + (gives_registers ? kGroupThreads
                                                           : in_bulk       ? 32 * (2 + groups)
                                                                           : 0);
};

// grouped: backwards, with several query heads a key-value head. plain: q and k come from their rows (two_pass.h,
// Plan::plain), with the copy engine; nothing decays.
template <class Core, int KB, int groups, bool outputs, bool grouped, bool plain>
__device__ __forceinline__ void recurrence(const Params& p, const Recurrence& run, const Segments& segments,
                                           char* shared) {
  using Plan = RecurrencePlan<Core, KB, groups, outputs, grouped, plain>;
  static_assert(!plain || Plan::in_bulk);
  constexpr int kSlots = Plan::slots, kVSlots = Plan::v_slots;
  constexpr bool kBulk = Core::copies_in_bulk;
  const std::uint32_t base = ptx::shared_address(shared);
  const int part = threadIdx.x / kGroupThreads;
  const int slices = (p.value_dim + 64 * groups - 1) / (64 * groups);
  // Forwards a block has a query head and the state of its key-value head, of which one query head of the group writes
  // what they share. Backwards, and without outputs, it has a key-value head; backwards with all of its query heads.
  const bool by_query = outputs && !grouped && !run.backwards;
  const int heads = by_query ? p.heads * p.group : p.heads, inner = grouped ? p.group : 1;
  const int K = p.key_dim, V = p.value_dim, first_key = 64 * run.first_block;
  // A group's first value channel; where it is needed seldom, worked out anew.
  const auto find_v0 = [&] { return (static_cast<int>(fresh_block() % slices) * groups + part) * 64; };
  const int v0 = find_v0();
  // With mma.sync and four key tiles there are no registers for what comes of it and is needed once a chunk.
  const auto v0_again = [](int v0) {
    if constexpr (KB == 4) return alike_shuffled<Core>(v0);
    return v0;
  };
  const PlaceInTime place = place_in_time(p.sequences, segments, blockIdx.x / slices, heads, segments.count);
  const std::int64_t n = place.n;
  if (n < 0) return;
  const int segment = place.segment, own_head = place.head, head = by_query ? own_head / p.group : own_head;
  const int x_head = head * inner, x_heads = p.heads * inner, score_head = by_query ? own_head : x_head;
  const Span span = span_of(p.sequences, n);
  const int chunks = static_cast<int>((span.length + kChunk - 1) / kChunk);
  const int begin = segments.count == 1 ? 0 : segment * segments.chunks;
  const int end = segments.count == 1 ? chunks : min(chunks, begin + segments.chunks);
  const auto index_of = [&](int c) { return grouped || run.backwards ? chunks - 1 - c : c; };  // of step c of the walk
  const bool leads = !by_query || own_head % p.group == 0;
  // Where states of f32 lie, worked out anew before the walk and after it.
  const auto state_in = [&](float* states) {
    return states == nullptr ? nullptr : states + (anew(n) * p.heads + head) * (static_cast<std::int64_t>(K) * V);
  };
  const auto segment_state = [&](int kb, int v0) {
    const std::int64_t of = static_cast<std::int64_t>(place.place) * p.heads + head;
    return segments.starts + ((of * tiles_of(V) + v0 / kTile) * run.blocks + run.first_block + kb) * (kTile * kTile);
  };
  const auto tile = [&](int i) { return static_cast<std::uint32_t>(i) * kTileBytes; };

  // A visit is a chunk with one of the query heads whose x goes into the state, KB steps long. The first of a chunk
  // also reads the state.
  const auto chunk_of_visit = [&](int visit) { return begin + (grouped ? visit / inner : visit); };
  const auto head_of_visit = [&](int visit) { return grouped ? visit % inner : 0; };
  const auto x_rows = [&](int visit, int v0) {
    return rows_of(run.x, 2, span, static_cast<std::int64_t>(index_of(chunk_of_visit(visit))) * kChunk,
                   x_head + head_of_visit(visit), v0, V);
  };
  const bool may_keep = run.states != nullptr && leads;
  const auto keeps = [&](int c) {  // whether the state before step c is kept; backwards of two chunks the walk's first
    const int index = index_of(c);
    return may_keep && (run.backwards ? p.states_every() == 1 || index % 2 == 1 || c == 0 : p.keeps_state(index));
  };
  const auto kept_tile = [&](int c, int kb, int v0) {
    return run.states + p.state_tile(p.state_slot(span.chunk_begin, n, index_of(c)), head, run.first_block + kb,
                                     v0_again(v0) / kTile);
  };
  const auto state_tile = [&](int part, int kb) {
    return base + tile(kBulk ? Plan::states + part * KB + kb : Plan::states + part);
  };
  const bool stores = outputs && run.ends_parts && run.out.data != nullptr;
  const auto out_rows = [&](int c, int v0) {
    return rows_of(run.out, 2, span, static_cast<std::int64_t>(index_of(c)) * kChunk, own_head, v0, V);
  };
  // Tiles that lie in memory as in shared memory: on Hopper by the copy engine, counted on an mbarrier, else by all
  // threads.
  const std::uint32_t filled = base + Plan::filled, emptied = base + Plan::emptied;
  const auto load = [&](std::uint32_t to, const void* from, int bytes, std::uint32_t barrier) {
    if constexpr (kBulk) {
      Core::copy_in(to, from, bytes, barrier);
    } else {
#pragma unroll 1
      for (int i = 16 * threadIdx.x; i < bytes; i += 16 * Plan::threads) {
        ptx::copy_async_16(to + i, static_cast<const char*>(from) + i);
      }
    }
  };
  struct Images {  // of a visit, from the launch's first key tile on
    bool read_state;
    const char *read, *write, *scores;
    const float* decay;
  };
  const auto images_of = [&](int visit) {
    const int i = head_of_visit(visit);
    const std::int64_t chunk = span.chunk_begin + index_of(chunk_of_visit(visit));
    return Images{i == 0, run.read + ((chunk * heads + own_head) * run.blocks + run.first_block) * kTileBytes,
                  run.write + ((chunk * x_heads + x_head + i) * run.blocks + run.first_block) * kTileBytes,
                  run.scores + (chunk * p.heads * p.group + score_head + i) * kTileBytes,
                  run.decay + ((chunk * p.heads + head) * run.blocks + run.first_block) * 64};
  };
  const auto load_step = [&](const Images& from, int visit, int kb, int slot) {
    constexpr int kTiles = Plan::by_chunk ? KB : 1;
    const std::uint32_t barrier = filled + 8 * slot, images = base + tile(Plan::images) + slot * tile(Plan::slot);
    const bool has_scores = outputs && kb == 0 && !run.adds_parts;
    if constexpr (kBulk) {
      Core::expect_bytes(barrier, kTileBytes * (kTiles + (outputs && from.read_state) + has_scores) +
                                      (from.read_state ? Plan::decay_bytes : 0));
    }
    const std::uint32_t written = images + tile(Plan::slot - kTiles);
    if constexpr (plain) {
      const auto bring = [&](std::uint32_t to, const RowMap& rows, int head, int kb) {
        Core::copy_box(to, &rows.map, first_key + kTile * kb, index_of(chunk_of_visit(visit)) * kChunk,
                       head * rows.head_step, static_cast<int>(n) * rows.batch_step, barrier);
      };
      // own_head, but for a register.
      if (outputs && from.read_state) bring(images, run.read_rows, by_query ? score_head : head, kb);
#pragma unroll 1
      for (int i = 0; i < kTiles; ++i) bring(written + tile(i), run.write_rows, x_head + head_of_visit(visit), kb + i);
    } else {
      if (from.read_state) {
        if (outputs) load(images, from.read + kb * kTileBytes, kTileBytes, barrier);
        load(base + Plan::decays + Plan::decay_bytes * slot, from.decay + 64 * kb, Plan::decay_bytes, barrier);
      }
      load(written, from.write + kb * kTileBytes, kTiles * kTileBytes, barrier);
    }
    if (has_scores) load(base + tile(Plan::scores + (visit & 1)), from.scores, kTileBytes, barrier);
  };
  const auto load_step_and_x = [&](int visit, int kb, int slot) {  // by all threads
    if (chunk_of_visit(visit) >= end) return;
    load_step(images_of(visit), visit, kb, slot);
    if (kb > 0) return;
    const int thread = fresh_thread();
    const Rows r = x_rows(visit, v0_again(v0));
    load_tile(base + tile(Plan::v + (visit & 1) * groups + part), r, thread);
  };
  if (outputs && run.adds_parts) {  // P has been there
    for (int i = threadIdx.x; i < 2 * (kTileBytes / 16); i += Plan::threads)
      store_shared_16(base + tile(Plan::scores) + 16 * i, make_uint4(0, 0, 0, 0));
    Core::publish();
  }
  if constexpr (kBulk) {
    if (threadIdx.x == 0) {
      const auto init = [](std::uint32_t first, int count, int arrivals) {
        for (int i = 0; i < count; ++i) Core::init_barrier(first + 8 * i, arrivals);
      };
      init(filled, kSlots, 1);
      init(filled + 8 * kSlots, kVSlots, 32);
      init(filled + 8 * (kSlots + kVSlots), groups, kGroupThreads);
      init(emptied, kSlots + kVSlots, groups * kGroupThreads);
      init(emptied + 8 * (kSlots + kVSlots), groups, 32);
      Core::publish_barriers();
    }
  }
  __syncthreads();
  if constexpr (kBulk) {
    flashgla::cuda::wait_for_previous();
    if (part == groups) {
      if constexpr (Plan::gives_registers) Core::template give<Plan::given>();
      const int lane = threadIdx.x % 32, role = static_cast<int>(threadIdx.x) / 32 - 4 * groups;
      const int first_v0 = v0 - 64 * groups, visits = max(end - begin, 0) * inner;
      if (role == 0) {  // brings images as soon as all have read a slot
        int slot = 0, parity = 1;
#pragma unroll 1
        for (int visit = 0; visit < visits; ++visit) {
          const Images from = images_of(visit);
#pragma unroll 1
          for (int kb = 0; kb < (Plan::by_chunk ? 1 : KB); ++kb) {
            Core::wait_at(emptied + 8 * slot, parity);
            if (lane == 0) load_step(from, visit, kb, slot);
            if (++slot == kSlots) {
              slot = 0;
              parity ^= 1;
            }
          }
        }
        // Not where segments are long: README.md, programmatic launch.
        if (outputs && (segments.count == 1 || segments.chunks <= 16)) flashgla::cuda::release_next();
        if constexpr (Plan::by_chunk) {  // nothing, which is read after the last chunk
          Core::wait_at(emptied + 8 * slot, parity);
          if (lane == 0) Core::arrive(filled + 8 * slot);
        }
      } else if (role == 1) {  // brings v of all groups
#pragma unroll 1
        for (int visit = 0; visit < visits + (Plan::by_chunk ? 1 : 0); ++visit) {
          const int slot = visit % kVSlots;
          const bool there = visit < visits;  // else nothing, as above
          const Rows rows = x_rows(there ? visit : 0, first_v0);
          Core::wait_at(emptied + 8 * (kSlots + slot), (visit / kVSlots & 1) ^ 1);
          if (there) {
            load_tiles_by_warp<groups>(base + tile(Plan::v + slot * groups), rows, lane);
            Core::arrive_after_copies(filled + 8 * (kSlots + slot));
          } else {
            Core::arrive(filled + 8 * (kSlots + slot));
          }
        }
      } else if (role < 2 + groups) {  // takes a group's outputs and kept states away
        const int of_group = role - 2, own_v0 = first_v0 + 64 * of_group;
        if (own_v0 >= V || !(stores || may_keep)) return;
        const std::uint32_t out = base + tile(Plan::out + of_group);
#pragma unroll 1
        for (int c = begin; c < end; ++c) {
          const bool keep = keeps(c);
          const Rows rows = out_rows(c, own_v0);
          Core::wait_at(filled + 8 * (kSlots + kVSlots + of_group), (c - begin) & 1);
          if (keep && lane == 0) {
#pragma unroll 1
            for (int kb = 0; kb < KB; ++kb)
              Core::copy_out(kept_tile(c, kb, own_v0), state_tile(of_group, kb), kTileBytes);
            Core::commit_copies_out();
          }
          if (stores) store_tile_by_warp(rows, out, lane);
          if (keep && lane == 0) Core::wait_for_copies_out();
          Core::arrive(emptied + 8 * (kSlots + kVSlots + of_group));
        }
      }
      return;
    }
    if constexpr (Plan::gives_registers) Core::template take<Plan::taken>();
  }

  Accumulator h[KB];
  float* const given = state_in(const_cast<float*>(run.start));
#pragma unroll
  for (int kb = 0; kb < KB; ++kb) {
    clear(h[kb]);
    if (v0_again(v0) >= V) continue;
    if (segment > 0) {
      add_part(h[kb], segment_state(kb, v0), fresh_thread());
    } else if (given != nullptr) {
      move_transposed_state<false>(h[kb], given, K, V, first_key + 64 * kb, v0, fresh_thread());
      if constexpr (plain) scale_rows(h[kb], run.start_scale, run.start_scale);
    }
  }

  if constexpr (!kBulk) {
#pragma unroll 1
    for (int i = 0; i < kSlots - 1; ++i) {
      load_step_and_x(i / KB, i % KB, i);
      ptx::copy_async_commit();
    }
  }
  int visit = 0, slot = 0, parity = 0;
  Accumulator o;
  std::uint32_t v[16];
  const auto wait_for_step = [&](int kb) {
    if constexpr (kBulk) {
      Core::wait_at(filled + 8 * slot, parity);
    } else {
      ptx::copy_async_wait<kSlots - 2>();
      __syncthreads();  // the step is there, and the slot of the one before has been read
      load_step_and_x(visit + (kb + kSlots - 1) / KB, (kb + kSlots - 1) % KB, (slot == 0 ? kSlots : slot) - 1);
      ptx::copy_async_commit();
    }
  };
  const std::uint32_t out_tile = base + tile(Plan::out + part);
  const bool hands_over = find_v0() < V && (stores || may_keep);  // to the warp that stores
  const auto wait_until_stored = [&](int c) {                     // what the chunk before c handed over
    if constexpr (kBulk) {
      if (hands_over) Core::wait_at(emptied + 8 * (kSlots + kVSlots + part), ((c - begin) & 1) ^ 1);
    }
  };
  const auto release = [&](int slot) {  // this thread has read it
    if constexpr (kBulk) Core::arrive(emptied + 8 * slot);
  };
  float2 decay[8];  // of this thread's columns of the next key tile
  const auto decays_of = [&](int kb) {
    return shared + Plan::decays + Plan::decay_bytes * slot + (Plan::by_chunk ? kTile * 4 * kb : 0);
  };
  const auto read_decays = [&](int kb, int thread, float2(&to)[8]) {
    if constexpr (plain) return;
    const char* from = decays_of(kb) + 8 * (thread % 4);
#pragma unroll
    for (int j = 0; j < 8; ++j) to[j] = *reinterpret_cast<const float2*>(from + 32 * j);
  };
  int last_slot = 0;
  const auto start_visit = [&](auto reads_state, int c, bool keep) {  // its last product goes on
    constexpr bool kReads = decltype(reads_state)::value;
    const int thread = fresh_thread(), x_slot = visit & 1;
    if constexpr (kBulk) Core::wait_at(filled + 8 * (kSlots + x_slot), visit >> 1 & 1);
    wait_for_step(0);
    if constexpr (kReads && !grouped) read_decays(0, thread, decay);
    const std::uint32_t v_tile = base + tile(Plan::v + x_slot * groups + part);
    load_operand<Stored::k_outer>(v, v_tile, thread);
    release(kSlots + x_slot);
    Core::begin(v);
#pragma unroll
    for (int kb = 0; kb < KB; ++kb) {
      const std::uint32_t q = base + tile(Plan::images) + slot * tile(Plan::slot), k = q + tile(Plan::slot - 1);
      std::uint32_t rounded[16];
      if constexpr (kReads) {
        if (outputs || keep) to_operand(rounded, h[kb]);
        if (keep) {
          put_operand<Core, true>(state_tile(part, kb), rounded, thread);
          if constexpr (!kBulk) {
            sync_group();
            store_tile_image(kept_tile(c, kb, v0), state_tile(part, kb), thread);
            sync_group();
          }
        }
        if constexpr (grouped) read_decays(kb, thread, decay);  // others ahead, in the shadow of the products
        if constexpr (!plain) scale_columns(h[kb], decay);
        if constexpr (outputs) Core::begin(rounded);
      }
      Core::begin(h[kb]);
      if constexpr (outputs) {
        if constexpr (kReads) {
          kb == 0 ? Core::template product<Stored::k_inner, true>(o, rounded, q, thread)
                  : Core::template product<Stored::k_inner>(o, rounded, q, thread);
        }
        if (kb == 0) Core::template product<Stored::k_inner>(o, v, base + tile(Plan::scores + x_slot), thread);
        Core::commit();
      }
      Core::template product<Stored::k_outer>(h[kb], v, k, thread);
      Core::commit();
      const int this_slot = slot;
      if (++slot == kSlots) {
        slot = 0;
        parity ^= 1;
      }
      const auto look_ahead = [&] {
        if (kb + 1 == KB) return;
        wait_for_step(kb + 1);
        if constexpr (kReads && !grouped) read_decays(kb + 1, thread, decay);
      };
      if constexpr (!plain) look_ahead();
      Core::template wait<1>();           // what was rounded is free again, and the step before is done
      if constexpr (plain) look_ahead();  // before, ptxas would round h ahead, for which there are no registers
      if (kb > 0) release(last_slot);
      last_slot = this_slot;
    }
  };
  const auto finish_visit = [&] {
    Core::template wait<0>(v);
#pragma unroll
    for (int kb = 0; kb < KB; ++kb) Core::template wait<0>(h[kb]);
    release(last_slot);
    ++visit;
  };
  // Without outputs: the state alone, all of a chunk at once. Its products follow one another while the next chunk's v
  // and first decays are read; after the last chunk whatever lies there, so that there is no branch around products.
  if constexpr (Plan::by_chunk) {
    int x_slot = 0, x_parity = 0;
    std::uint32_t next_v[16];
    const auto read_chunk = [&](int thread) {
      Core::wait_at(filled + 8 * slot, parity);
      read_decays(0, thread, decay);
      Core::wait_at(filled + 8 * (kSlots + x_slot), x_parity);
      load_operand<Stored::k_outer>(next_v, base + tile(Plan::v + x_slot * groups + part), thread);
      release(kSlots + x_slot);
    };
    read_chunk(fresh_thread());
#pragma unroll 1
    for (int c = begin; c < end; ++c) {
      const bool keep = hands_over && keeps(c);
      if (keep && (c == begin + 1 || p.states_every() == 1)) wait_until_stored(c);  // two in a row are kept
      const int thread = fresh_thread();
#pragma unroll
      for (int i = 0; i < 16; ++i) v[i] = next_v[i];
      Core::begin(v);
      // Seen to be alike in a warp, so that descriptors are in uniform registers.
      const std::uint32_t images = __shfl_sync(0xffffffffu, base + tile(Plan::images + slot * Plan::slot), 0);
#pragma unroll
      for (int kb = 0; kb < KB; ++kb) {
        if (keep) {
          std::uint32_t rounded[16];
          to_operand(rounded, h[kb]);
          put_operand<Core, true>(state_tile(part, kb), rounded, thread);
        }
        float2 ahead[8];
        if (kb + 1 < KB) read_decays(kb + 1, thread, ahead);
        if constexpr (!plain) scale_columns(h[kb], decay);
        Core::begin(h[kb]);
        Core::template product<Stored::k_outer>(h[kb], v, images + tile(kb), thread);
        Core::commit();
        if (kb + 1 < KB) {
          Core::template wait<1>();
#pragma unroll
          for (int j = 0; j < 8 && !plain; ++j) decay[j] = ahead[j];
        }
      }
      const int this_slot = slot;
      if (++slot == kSlots) {
        slot = 0;
        parity ^= 1;
      }
      if (++x_slot == kVSlots) {
        x_slot = 0;
        x_parity ^= 1;
      }
      read_chunk(thread);
      Core::template wait<0>(v);
#pragma unroll
      for (int kb = 0; kb < KB; ++kb) Core::template wait<0>(h[kb]);
      release(this_slot);
      wait_until_stored(c);
      if (keep) Core::publish();
      if (hands_over) Core::arrive(filled + 8 * (kSlots + kVSlots + part));
    }
  } else {
#pragma unroll 1
    for (int c = begin; c < end; ++c) {
      const bool keep = v0_again(v0) < V && keeps(c);
      const auto part_of_out = [&] {
        const std::int64_t of = (span.chunk_begin + index_of(c)) * heads + own_head;
        return run.parts + (of * tiles_of(V) + find_v0() / 64) * (kTile * kTile);
      };
      if (keep && (c == begin + 1 || p.states_every() == 1)) wait_until_stored(c);  // two in a row are kept
      start_visit(std::true_type{}, c, keep);
#pragma unroll 1
      for (int i = 1; grouped && i < inner; ++i) {
        finish_visit();
        start_visit(std::false_type{}, c, false);
      }
      const int thread = fresh_thread();
      wait_until_stored(c);
      if constexpr (outputs) {
        Core::template wait<1>(o);
        if (run.adds_parts && find_v0() < V) add_part(o, part_of_out(), thread);
        if (run.ends_parts) {
          std::uint32_t rounded[16];
          if constexpr (plain) scale_rows(o, run.out_scale, run.out_scale);
          to_operand(rounded, o);
          put_operand<Core, true>(out_tile, rounded, thread);
        } else if (find_v0() < V) {
          write_part(part_of_out(), o, thread);
        }
      }
      if constexpr (kBulk) {
        if (keep) Core::publish();
        if (hands_over) Core::arrive(filled + 8 * (kSlots + kVSlots + part));
      } else if (stores) {
        sync_group();
        const Rows rows = out_rows(c, v0_again(v0));
        store_tile(rows, out_tile, thread);
      }
      finish_visit();
    }
  }
  const int thread = fresh_thread();
  if (!leads) return;
  const int end_v0 = find_v0();
  if (end_v0 >= V) return;
  // The end of the sequence: of its last segment that has chunks, or of the first if it is empty.
  const bool last = segments.count == 1 || segment == (max(chunks, 1) - 1) / segments.chunks;
  float* const wanted = last && outputs ? state_in(run.end) : nullptr;
  if (wanted == nullptr) return;
#pragma unroll
  for (int kb = 0; kb < KB; ++kb) {
    if constexpr (plain) scale_rows(h[kb], run.end_scale, run.end_scale);
    move_transposed_state<true>(h[kb], wanted, K, V, first_key + 64 * kb, end_v0, thread);
  }
}

// grid: places of segments * (H forwards with outputs, else G) * ceil(V / (64 groups)), value slices fastest.
// Chunk-start states, outputs and ht as wanted.
template <class Core, int KB, int groups, bool outputs, bool grouped, bool plain>
__global__ void __launch_bounds__((RecurrencePlan<Core, KB, groups, outputs, grouped, plain>::threads),
                                  (RecurrencePlan<Core, KB, groups, outputs, grouped, plain>::blocks))
    recurrence_kernel(const __grid_constant__ Params p, const __grid_constant__ Recurrence run,
                      const __grid_constant__ Segments segments) {
  using Plan = RecurrencePlan<Core, KB, groups, outputs, grouped, plain>;
  if (!Plan::in_bulk || p.sequences.cu_seqlens != nullptr) flashgla::cuda::wait_for_previous();
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Core::available) recurrence<Core, KB, groups, outputs, grouped, plain>(p, run, segments, shared);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
