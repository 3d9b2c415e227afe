// Where a block of the recurrence (forward/recurrence.cuh) is: its tiles, its heads and chunks, and copies between
// memory and shared memory.
#pragma once

#include <type_traits>

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/estimates.h"
#include "flashgla/ops/gated_linear_attention/cuda/forward/place_in_time.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/forward/two_pass.h"
#include "flashgla/ops/gated_linear_attention/cuda/tiles/pieces.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// Tiles of shared memory, in this order; then bytes. grouped, plain: as recurrence().
template <class Core, int KB, int groups, bool outputs, bool grouped, bool plain>
struct RecurrencePlan {
  static constexpr bool in_bulk = std::is_same_v<Core, TensorCore90>;
  static constexpr int blocks = recurrence_blocks(KB, groups);
  static constexpr int slot = outputs ? 2 : 1;  // tiles: of each key tile q~ and k~, or k~
  // P, and without warps that load v too, have two slots and no barriers of their own: there slots <= 2 KB.
  static constexpr int most_slots = KB == 1 ? 2 : !in_bulk || blocks > 1 ? 3 : KB == 2 ? 4 : 6;
  static constexpr int slots = in_bulk && !outputs ? 2 * most_slots : most_slots;
  static constexpr int v_slots = 2;
  static constexpr int images = 0;                      // [slots][slot]
  static constexpr int scores = images + slots * slot;  // [2]
  static constexpr int v = scores + (outputs ? 2 : 0);  // [v_slots][groups]
  static constexpr int out = v + v_slots * groups;      // [groups]
  // [groups][KB], or the tile of the output
  static constexpr int states = in_bulk && outputs ? out + groups : out;
  static constexpr int decays = (in_bulk ? states + groups * KB : out + groups) * kTileBytes;
  // [slots] of 64 floats; then barriers: of slots, of v [v_slots], of what leaves [groups].
  static constexpr int decay_bytes = plain ? 0 : kTile * 4;
  static constexpr int full = decays + slots * decay_bytes;
  static constexpr int empty = full + (slots + v_slots + groups) * 8;
  static constexpr int bytes = empty + (slots + v_slots + groups) * 8;
  // The warps that load and store are a group, which can give registers away, where the others need more than their
  // share.
  static constexpr bool gives_registers = in_bulk && (groups == 2 ? KB >= 2 : KB <= 2);
  static constexpr int producer_registers = groups == 1 && KB == 1 ? 72 : 56,
                       consumer_registers = groups == 2 ? 224 : 256 - producer_registers;
  static constexpr int threads = groups * kGroupThreads + (gives_registers ? kGroupThreads
                                                           : in_bulk       ? 32 * (2 + groups)
                                                                           : 0);
};

struct RecurrenceImages {  // of a visit, from the launch's first key tile on
  bool read_state;
  const char *read, *write, *scores;
  const float* decay;
};

// A visit is a chunk with one of the query heads whose x goes into the state, KB steps long. The first of a chunk also
// reads the state. Forwards a block has a query head and the state of its key-value head, of which one query head of
// the group writes what they share. Backwards, and without outputs, it has a key-value head; backwards with all of its
// query heads.
template <class Core, int KB, int groups, bool outputs, bool grouped, bool plain>
struct RecurrenceView {
  using Plan = RecurrencePlan<Core, KB, groups, outputs, grouped, plain>;
  static constexpr bool kBulk = Plan::in_bulk;
  static constexpr int kSlots = Plan::slots, kVSlots = Plan::v_slots;
  const Params& p;
  const Recurrence& run;
  const Segments& segments;
  const std::uint32_t base;
  const int part = threadIdx.x / kGroupThreads, slices = (p.value_dim + 64 * groups - 1) / (64 * groups);
  const bool by_query = outputs && !grouped && !run.backwards;
  const int heads = by_query ? p.heads * p.group : p.heads, inner = grouped ? p.group : 1;
  const int K = p.key_dim, V = p.value_dim, first_key = 64 * run.first_block;
  const int v0 = find_v0();  // a group's first value channel
  const PlaceInTime place = place_in_time<false>(p.sequences, segments, blockIdx.x / slices, heads);
  // Where the place has tokens:
  std::int64_t n;
  int segment, own_head, head, x_head, x_heads, score_head;
  Span span;
  int chunks, begin, end;
  bool leads, may_keep, stores;
  std::uint32_t full, empty;

  __device__ __forceinline__ bool start() {
    n = place.n;
    if (n < 0) return false;
    segment = place.segment, own_head = place.head, head = by_query ? own_head / p.group : own_head;
    x_head = head * inner, x_heads = p.heads * inner, score_head = by_query ? own_head : x_head;
    span = span_of(p.sequences, n);
    chunks = static_cast<int>((span.length + kChunk - 1) / kChunk);
    if (chunks == 0 && run.end == nullptr) return false;  // no state is passed on
    begin = segments.count == 1 ? 0 : segment * segments.chunks;
    end = segments.count == 1 ? chunks : min(chunks, begin + segments.chunks);
    leads = !by_query | (own_head % p.group == 0);
    may_keep = run.states != nullptr && leads;
    stores = outputs && run.ends_parts && run.out.data != nullptr;
    full = base + Plan::full, empty = base + Plan::empty;
    return true;
  }

  // The group's first value channel, where it is needed seldom, worked out anew.
  __device__ __forceinline__ int find_v0() const {
    return (static_cast<int>(fresh_block() % slices) * groups + part) * 64;
  }
  // With mma.sync and four key tiles there are no registers for what comes of it and is needed once a chunk.
  static __device__ __forceinline__ int v0_again(int v0) {
    if constexpr (KB == 4) return alike_shuffled<Core>(v0);
    return v0;
  }
  static __device__ __forceinline__ std::uint32_t tile(int i) { return static_cast<std::uint32_t>(i) * kTileBytes; }
  __device__ __forceinline__ std::uint32_t state_tile(int part, int kb) const {
    return base + tile(kBulk ? Plan::states + part * KB + kb : Plan::states + part);
  }

  // Of step c of the walk.
  __device__ __forceinline__ int index_of(int c) const { return grouped || run.backwards ? chunks - 1 - c : c; }
  __device__ __forceinline__ int chunk_of_visit(int visit) const { return begin + (grouped ? visit / inner : visit); }
  __device__ __forceinline__ int head_of_visit(int visit) const { return grouped ? visit % inner : 0; }
  // Whether the state before step c is kept; backwards of two chunks the walk's first.
  __device__ __forceinline__ bool keeps(int c) const {
    const int index = index_of(c);
    return may_keep && (run.backwards ? p.states_every() == 1 || index % 2 == 1 || c == 0 : p.keeps_state(index));
  }

  // ---- in memory ----
  // Where states of f32 lie, worked out anew before the walk and after it.
  __device__ __forceinline__ float* state_in(float* states) const {
    return states == nullptr ? nullptr : states + (anew(n) * p.heads + head) * (static_cast<std::int64_t>(K) * V);
  }
  __device__ __forceinline__ const float* segment_state(int kb, int v0) const {
    const std::int64_t of = static_cast<std::int64_t>(place.join) * p.heads + head;
    return segments.starts + ((of * tiles_of(V) + v0 / kTile) * run.blocks + run.first_block + kb) * (kTile * kTile);
  }
  __device__ __forceinline__ Rows x_rows(int visit, int v0) const {
    return rows_of(run.x, 2, chunk_of(span, index_of(chunk_of_visit(visit))), x_head + head_of_visit(visit), v0, V);
  }
  __device__ __forceinline__ Rows out_rows(int c, int v0) const {
    return rows_of(run.out, 2, chunk_of(span, index_of(c)), own_head, v0, V);
  }
  __device__ __forceinline__ char* kept_tile(int c, int kb, int v0) const {
    return run.states + p.state_tile(p.state_slot(span.chunk_begin, n, index_of(c)), head, run.first_block + kb,
                                     v0_again(v0) / kTile);
  }
  __device__ __forceinline__ float* part_of_out(int c) const {
    const std::int64_t of = (span.chunk_begin + index_of(c)) * heads + own_head;
    return run.parts + (of * tiles_of(V) + find_v0() / 64) * (kTile * kTile);
  }
  __device__ __forceinline__ RecurrenceImages images_of(int visit) const {
    const int i = head_of_visit(visit);
    const std::int64_t chunk = span.chunk_begin + index_of(chunk_of_visit(visit));
    return RecurrenceImages{i == 0, run.read + ((chunk * heads + own_head) * run.blocks + run.first_block) * kTileBytes,
                            run.write + ((chunk * x_heads + x_head + i) * run.blocks + run.first_block) * kTileBytes,
                            run.scores + (chunk * p.heads * p.group + score_head + i) * kTileBytes,
                            run.decay + ((chunk * p.heads + head) * run.blocks + run.first_block) * 64};
  }

  // ---- copies ----
  // Tiles that lie in memory as in shared memory: on Hopper by TMA, counted on an mbarrier, else by all
  // threads.
  __device__ __forceinline__ void load(std::uint32_t to, const void* from, int bytes, std::uint32_t barrier) const {
    if constexpr (kBulk) {
      Core::copy_in(to, from, bytes, barrier);
    } else {
#pragma unroll 1
      for (int i = 16 * threadIdx.x; i < bytes; i += 16 * Plan::threads) {
        ptx::copy_async_16(to + i, static_cast<const char*>(from) + i);
      }
    }
  }
  __device__ __forceinline__ void load_step(const RecurrenceImages& from, int visit, int kb, int slot) const {
    const std::uint32_t barrier = full + 8 * slot, images = base + tile(Plan::images) + slot * tile(Plan::slot);
    const bool has_scores = outputs && kb == 0 && !run.adds_parts;
    if constexpr (kBulk) {
      Core::expect_bytes(barrier, kTileBytes * (1 + (outputs && from.read_state) + has_scores) +
                                      (from.read_state ? Plan::decay_bytes : 0));
    }
    const std::uint32_t written = images + tile(Plan::slot - 1);
    if constexpr (plain) {
      const auto copy = [&](std::uint32_t to, const RowMap& rows, int head) {
        Core::copy_box(to, &rows.map, first_key + kTile * kb, index_of(chunk_of_visit(visit)) * kChunk,
                       head * rows.head_step, static_cast<int>(n) * rows.batch_step, barrier);
      };
      // own_head, but for a register.
      if (outputs && from.read_state) copy(images, run.read_rows, by_query ? score_head : head);
      copy(written, run.write_rows, x_head + head_of_visit(visit));
    } else {
      if (from.read_state) {
        if (outputs) load(images, from.read + kb * kTileBytes, kTileBytes, barrier);
        load(base + Plan::decays + Plan::decay_bytes * slot, from.decay + 64 * kb, Plan::decay_bytes, barrier);
      }
      load(written, from.write + kb * kTileBytes, kTileBytes, barrier);
    }
    if (has_scores) load(base + tile(Plan::scores + (visit & 1)), from.scores, kTileBytes, barrier);
  }
  __device__ __forceinline__ void load_step_and_x(int visit, int kb, int slot) const {  // by all threads
    if (chunk_of_visit(visit) >= end) return;
    load_step(images_of(visit), visit, kb, slot);
    if (kb > 0) return;
    const int thread = fresh_thread();
    const Rows r = x_rows(visit, v0_again(v0));
    load_tile(base + tile(Plan::v + (visit & 1) * groups + part), r, thread);
  }

  // ---- warps that load and store ----
  __device__ __forceinline__ void init_barriers() const {
    const auto init = [](std::uint32_t first, int count, int arrivals) {
      for (int i = 0; i < count; ++i) Core::init_barrier(first + 8 * i, arrivals);
    };
    init(full, kSlots, 1);
    init(full + 8 * kSlots, kVSlots, 32);
    init(full + 8 * (kSlots + kVSlots), groups, kGroupThreads);
    init(empty, kSlots + kVSlots, groups * kGroupThreads);
    init(empty + 8 * (kSlots + kVSlots), groups, 32);
    Core::publish_barriers();
  }
  // Images, as soon as all have read a slot.
  __device__ __forceinline__ void produce_images(int visits, int lane) const {
    Turn turn{.parity = 1};  // all are free at first
#pragma unroll 1
    for (int visit = 0; visit < visits; ++visit) {
      const RecurrenceImages from = images_of(visit);
#pragma unroll 1
      for (int kb = 0; kb < KB; ++kb) {
        Core::wait_at(empty + 8 * turn.slot, turn.parity);
        if (lane == 0) load_step(from, visit, kb, turn.slot);
        turn.step(kSlots);
      }
    }
    // Not where segments are long: README.md, programmatic launch.
    if (outputs && (segments.count == 1 || segments.chunks <= 16)) flashgla::cuda::release_next();
  }
  // v of all groups.
  __device__ __forceinline__ void produce_values(int visits, int first_v0, int lane) const {
#pragma unroll 1
    for (int visit = 0; visit < visits; ++visit) {
      const int slot = visit % kVSlots;
      const Rows rows = x_rows(visit, first_v0);
      Core::wait_at(empty + 8 * (kSlots + slot), (visit / kVSlots & 1) ^ 1);
      load_tiles_by_warp<groups>(base + tile(Plan::v + slot * groups), rows, lane);
      Core::arrive_after_copies(full + 8 * (kSlots + slot));
    }
  }
  // A group's outputs and kept states to memory.
  __device__ __forceinline__ void take_away(int of_group, int first_v0, int lane) const {
    const int own_v0 = first_v0 + 64 * of_group;
    if (own_v0 >= V || !(stores || may_keep)) return;
    const std::uint32_t out = base + tile(Plan::out + of_group);
#pragma unroll 1
    for (int c = begin; c < end; ++c) {
      const bool keep = keeps(c);
      const Rows rows = out_rows(c, own_v0);
      Core::wait_at(full + 8 * (kSlots + kVSlots + of_group), (c - begin) & 1);
      if (keep && lane == 0) {
#pragma unroll 1
        for (int kb = 0; kb < KB; ++kb) {
          Core::copy_out(kept_tile(c, kb, own_v0), state_tile(of_group, kb), kTileBytes);
        }
        Core::commit_copies_out();
      }
      if (stores) store_tile_by_warp(rows, out, lane);
      if (keep && lane == 0) Core::wait_for_copies_out();
      Core::arrive(empty + 8 * (kSlots + kVSlots + of_group));
    }
  }
  __device__ __forceinline__ void load_and_store() const {
    const int lane = threadIdx.x % 32, role = static_cast<int>(threadIdx.x) / 32 - 4 * groups;
    const int first_v0 = v0 - 64 * groups, visits = max(end - begin, 0) * inner;
    if (role == 0) {
      produce_images(visits, lane);
    } else if (role == 1) {
      produce_values(visits, first_v0, lane);
    } else if (role < 2 + groups) {
      take_away(role - 2, first_v0, lane);
    }
  }
};

}  // namespace flashgla::ops::gated_linear_attention::cuda
