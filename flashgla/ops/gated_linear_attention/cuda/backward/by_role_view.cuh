// What the groups of backward/by_role.cuh share: where things lie in shared memory, the walk over sequences and heads,
// and who waits for what.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/backward/one_kernel.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/tiles/row_maps.h"

namespace flashgla::ops::gated_linear_attention::cuda {

enum class Role { dq, dv, dk };

struct RoleMaps {  // and what else the host tells the kernel
  RowMap q, k, v, d_o;
  // [Role]: where it goes, without data where it is not wanted, and that in boxes of a warp's rows.
  Strided rows[3];
  RowMap out[3];
  unsigned units;  // sequences times heads
};

template <bool kGated>
struct ByRole {
  // dq, dv, dk; dh; h; those that bring and sum.
  static constexpr int row_groups = 3, working_groups = 5, threads = (working_groups + 1) * kGroupThreads;
  // Who reads a chunk's q or do, who its k, v or h, after h of the chunks behind it have been made.
  static constexpr int chunk_readers = (row_groups + 1) * kGroupThreads;
  // A thread's registers: what each begins with, and what the groups have after they have shared; dh's and h's keep
  // theirs.
  static constexpr int registers = 80, row_registers = 96, producer_registers = 32;
  static_assert(row_groups * row_registers + 2 * registers + producer_registers == (working_groups + 1) * registers);
  // Segments lie in memory from their first chunk on, are brought in that order, and are gone through from their last
  // chunk on: a chunk has two numbers, how many were brought before it and how many were gone through. `ring`: barriers
  // go round by these numbers; more than slots and a segment together.
  static constexpr int segment = kFoundEvery, slots = segment + 1, stages = kGated ? 3 : 4, ring = 16;
  static_assert(ring >= slots + segment);

  // Offsets. A slot: k, v and h of a chunk. A stage: q and do of one.
  static constexpr int k = 0, v = kTileBytes, h = 2 * kTileBytes, slot = 3 * kTileBytes;
  static constexpr int first_stage = slots * slot, q = 0, d_o = kTileBytes, stage = 2 * kTileBytes;
  static constexpr int dh = first_stage + stages * stage, dh_transposed = dh + kTileBytes;
  // Tiles through which dq, dv and dk leave.
  static constexpr int out = dh_transposed + kTileBytes;
  // Of a chunk: b; and, of pairs of tokens as {rounded to bf16, what is left}, scale 2^b and 2^(B - b). [sum_ring] by
  // chunks brought: of two segments, so that what is written over has been gone through by the release asked for.
  static constexpr int sum_ring = 2 * segment, sums = out + row_groups * kTileBytes, query_factors = kTile * 4,
                       key_factors = 2 * kTile * 4, chunk_sums = 3 * kTile * 4;
  static constexpr int dots = sums + (kGated ? sum_ring * chunk_sums : 0);  // q . dq [64], k . dk [64]
  static constexpr int beyond = dots + (kGated ? 2 * kTile * 4 : 0);  // [4 warps of dh's group]: dh h at the start
  static constexpr int keys_full = beyond + 4 * 4;      // [ring] by chunks brought: k, v, b (and a kept h) are there
  static constexpr int h_full = keys_full + ring * 8;   // [ring] the same: h is there
  static constexpr int keys_empty = h_full + ring * 8;  // [ring] by chunks gone through: their slot is free
  static constexpr int queries_full = keys_empty + ring * 8;       // [stages]: q and do are there
  static constexpr int queries_empty = queries_full + stages * 8;  // [stages]: they have been read
  static constexpr int dh_full = queries_empty + stages * 8, dh_empty = dh_full + 8;
  static constexpr int dots_full = dh_empty + 8, dots_empty = dots_full + 8;
  static constexpr int keys_in_step = dots_empty + 8, queries_in_step = keys_in_step + 8;
  static constexpr int slot_of = queries_in_step + 8;    // [ring] by chunks brought
  static constexpr int slot_freed = slot_of + ring * 4;  // [ring] by chunks gone through
  static constexpr int total = slot_freed + ring * 4;
  static_assert(total <= 227 * 1024);
};

// A block's walk over sequences and heads, and over segments of each from the last one on. Sequences without tokens are
// part of it, with no segment.
struct SegmentWalk {
  unsigned unit;           // sequence * G + head
  int head, batch, begin;  // begin: the sequence's first token in its row of the batch
  int first, count;        // the segment's chunks
  int last_rows;           // tokens of its last chunk
  bool is_last;            // of its sequence
  int before;              // chunks of segments before this one in the walk
  template <class View>
  __device__ __forceinline__ bool there(const View& view) const {
    return unit < view.units;
  }
  __device__ __forceinline__ int token(int index) const { return begin + index * kChunk; }
  // Tokens of its chunk i.
  __device__ __forceinline__ int rows(int i) const { return i + 1 < count ? kChunk : last_rows; }
  // Address of a chunk in a tensor of `element` bytes.
  __device__ __forceinline__ char* place(const Strided& x, int index, int element) const {
    return static_cast<char*>(x.data) + (batch * x.batch + token(index) * x.token + head * x.head) * element;
  }
  template <class View>
  __device__ __forceinline__ explicit SegmentWalk(const View& view) : unit(blockIdx.x), before(0) {
    begin_unit(view);
  }
  // The next segment, of the same sequence and head where it has one.
  template <class View>
  __device__ __forceinline__ void next(const View& view) {
    before += count;
    if (first > 0) {
      first -= kFoundEvery;
      count = kFoundEvery;
      last_rows = kChunk;
      is_last = false;
    } else {
      unit += gridDim.x;
      begin_unit(view);
    }
  }

 private:
  template <class View>
  __device__ __forceinline__ void begin_unit(const View& view) {
    first = count = 0;
    is_last = true;
    if (!there(view)) return;
    head = static_cast<int>(unit % view.p.heads);
    const Span span = span_of(view.p.sequences, unit / view.p.heads);
    const int length = static_cast<int>(span.length);  // there are tensor maps, which count to 2^31
    batch = static_cast<int>(span.batch);
    begin = static_cast<int>(span.begin);
    if (length == 0) return;
    const int chunks = (length - 1) / kChunk + 1;
    last_rows = length - (chunks - 1) * kChunk;
    first = (chunks - 1) / kFoundEvery * kFoundEvery;
    count = chunks - first;
  }
};

// Where things are in shared memory, and who waits for what.
template <class CoreIn, bool kGatedIn>
struct RoleView {
  using Core = CoreIn;
  static constexpr bool kGated = kGatedIn;
  using Layout = ByRole<kGated>;
  const Params& p;
  const unsigned& units;  // sequences times heads
  std::uint32_t base;
  bool in_pairs;  // of blocks, which ask for neighbouring heads' rows at the same time

  // One lane: waits until the other block's is here for the `time`th time too.
  __device__ __forceinline__ void in_step(int offset, int time) const {
    if (!in_pairs) return;
    const std::uint32_t barrier = base + offset;
    Core::arrive(barrier);
    Core::arrive_there(Core::there(barrier, (blockIdx.x & 1) ^ 1));
    Core::wait_at(barrier, time & 1);
  }
  __device__ __forceinline__ std::uint32_t ringed(int offset, int number) const {
    return base + offset + number % Layout::ring * 8;
  }
  __device__ __forceinline__ void wait_ringed(int offset, int number) const {
    Core::wait_at(ringed(offset, number), number / Layout::ring & 1);
  }
  // Of a chunk that has been brought.
  __device__ __forceinline__ int slot_of(int number) const {
    return static_cast<int>(load_shared_4(base + Layout::slot_of + number % Layout::ring * 4));
  }
  __device__ __forceinline__ std::uint32_t tiles_of(int slot) const { return base + slot * Layout::slot; }
  __device__ __forceinline__ std::uint32_t sums_of(int number) const {
    return base + Layout::sums + number % Layout::sum_ring * Layout::chunk_sums;
  }
};

// A chunk as its readers find it, in the order they go through: which number it has and which stage its q and do are
// in.
template <class View>
struct ChunkWalk {
  using Core = typename View::Core;
  using Layout = typename View::Layout;
  Turn turn;
  int number, gone_through;          // by which it is known
  std::uint32_t stage, tiles, sums;  // once it is there

  // Chunk i of a segment is next.
  __device__ __forceinline__ void begin(const SegmentWalk& segment, int i) {
    number = segment.before + i;
    gone_through = segment.before + segment.count - 1 - i;
  }
  __device__ __forceinline__ void wait(const View& view) {
    Core::wait_at(view.base + Layout::queries_full + turn.slot * 8, turn.parity);
    view.wait_ringed(Layout::keys_full, number);
    const int slot = view.slot_of(number);
    stage = view.base + Layout::first_stage + turn.slot * Layout::stage;
    tiles = view.tiles_of(slot);
    sums = view.sums_of(number);
  }
  // Where sequences are packed, rows of a last chunk beyond its tokens are another sequence's: each of the readers
  // clears them in one of the four tiles. All of them come here.
  __device__ __forceinline__ void clear_rows(std::uint32_t tile, int rows) const {
    const int thread = fresh_thread();
    for (int row = thread / 8; row < kTile; row += kGroupThreads / 8) {
      if (row >= rows) store_shared_16(tile + tile_piece(row, thread % 8), make_uint4(0, 0, 0, 0));
    }
    Core::publish();
    ptx::barrier(1, Layout::chunk_readers);
  }
  __device__ __forceinline__ void leave(const View& view) const {
    Core::arrive(view.base + Layout::queries_empty + turn.slot * 8);
    Core::arrive(view.ringed(Layout::keys_empty, gone_through));
  }
  __device__ __forceinline__ void step() { turn.step(Layout::stages); }
};

}  // namespace flashgla::ops::gated_linear_attention::cuda
