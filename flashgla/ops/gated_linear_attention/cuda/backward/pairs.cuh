// The walk of make_dq_dk_dg over pairs of chunks, and how it lays out shared memory.
#pragma once

#include <type_traits>

#include "flashgla/ops/gated_linear_attention/cuda/backward/gates.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/tiles/tile.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

constexpr int kPairThreads = 2 * kGroupThreads;

// One query head of a pair of chunks, a kv head and a key tile: what a block works on at a time.
struct PairPlace {
  unsigned item;                    // of the grid's pairs x G x key tiles
  unsigned unit;                    // how many places the block's walk had before this one
  int key_tile, kv_head, in_group;  // in_group: which of the kv head's query heads
  int rows_early, rows_late;        // tokens; no late chunk where 0, nothing to do where both are 0
  int n;                            // sequence
  std::int64_t batch, token;        // of the early chunk's first token
  std::int64_t chunk;               // number of the early chunk
  std::int64_t state, gradient;     // where h and dh of the pair begin among theirs, in bytes
};

template <class Core>
struct PairShared {  // offsets
  static constexpr bool in_bulk = std::is_same_v<Core, TensorCore90>;
  // A third group, of which a thread of each warp tells TMA what to bring; a thread's registers after the
  // three have shared the 168 that each begins with.
  static constexpr int threads = in_bulk ? kPairThreads + kGroupThreads : kPairThreads;
  static constexpr int consumer_registers = 232, producer_registers = 40;
  static constexpr int producer_warps = kGroupThreads / 32;
  // A tile of values of the pair. What is multiplied by one and the same tile lies side by side: v early, h and v late
  // by do late; do late, dh and do early by v early.
  static constexpr int v_early = 0, h = kTileBytes, v_late = 2 * kTileBytes, d_o_late = 3 * kTileBytes,
                       dh = 4 * kTileBytes, d_o_early = 5 * kTileBytes, stage = 6 * kTileBytes;
  static constexpr int stages = in_bulk ? 3 : 2;
  // The epilogue's, of each group: q~, k~, a, and gates, or what a steep tile needs. Over the stages where these are
  // not filled ahead, so that 99 KiB do.
  static constexpr int q = 0, k = kTileBytes, a = 2 * kTileBytes, gates = 3 * kTileBytes, group = 4 * kTileBytes;
  static constexpr int epilogue = in_bulk ? stages * stage : 0;
  static constexpr int parts = epilogue + 2 * group;
  // [2] each, of the groups: sums by keys, by the other chunk; decays, sums by row, what the
  // exponents of dq's and of dk's factors begin with and 2^-B.
  static constexpr int decays = parts + 4 * sizeof(ColumnParts), row_sums = decays + 2 * kTile * 4,
                       columns = row_sums + 2 * kTile * 4, beyond = columns + 6 * kTile * 4,
                       epilogue_end = beyond + kTile * 4;
  // What goes on from one query head to the next, [2]: r, and warps' parts of dg of constant gates [4]; and the walk.
  static constexpr int run = epilogue_end > stages* stage ? epilogue_end : stages* stage;
  static constexpr int crossings = run + 2 * kTile * 4;
  static constexpr int kept_places = 4;
  // mbarriers, full and empty: of the stages [stages], of the epilogue's inputs, of places in the walk, of which no
  // empty one is needed [kept_places].
  static constexpr int full = crossings + 2 * 4 * 4, inputs_full = full + stages * 8, empty = inputs_full + 8,
                       inputs_empty = empty + stages * 8, places_full = inputs_empty + 8,
                       places = places_full + kept_places * 8;
  static constexpr int total = places + kept_places * static_cast<int>(sizeof(PairPlace));
};

// Number of the first pair of sequence n, where sequences are packed: no less than all before it have.
__device__ __forceinline__ std::int64_t first_pair(const Sequences& s, std::int64_t n) {
  return (s.chunk_begin[n] + n) / 2;
}
// Pairs are numbered up to this.
inline std::int64_t most_pairs(const Sequences& s) {
  return s.cu_seqlens != nullptr ? (s.most_chunks + s.count) / 2 + 1 : s.count * ((s.chunks_each() + 1) / 2);
}

// Fills in what lies at place.item; the sequence is not before place.n. Returns whether there is anything.
__device__ __forceinline__ bool find_pair(PairPlace& place, const Params& p) {
  const unsigned key_tiles = tiles_of(p.key_dim), heads = p.heads;
  place.key_tile = static_cast<int>(place.item % key_tiles);
  place.kv_head = static_cast<int>(place.item / key_tiles % heads);
  place.in_group = 0;
  const unsigned pair = place.item / key_tiles / heads;
  const Sequences& s = p.sequences;
  unsigned index;
  if (s.cu_seqlens == nullptr) {
    const unsigned each = static_cast<unsigned>((s.chunks_each() + 1) / 2);
    place.n = static_cast<int>(pair / each);
    index = 2 * (pair % each);
  } else {
    // The last n whose first pair is not beyond: by steps that grow, then by halves.
    std::int64_t low = place.n, step = 1;
    while (low + step < s.count && first_pair(s, low + step) <= pair) {
      low += step;
      step *= 2;
    }
    for (; step > 0; step /= 2) {
      if (low + step < s.count && first_pair(s, low + step) <= pair) low += step;
    }
    place.n = static_cast<int>(low);
    index = 2 * static_cast<unsigned>(pair - first_pair(s, low));
  }
  const Span span = span_of(s, place.n);
  const std::int64_t left = span.length - static_cast<std::int64_t>(index) * kChunk;
  if (left <= 0) return false;
  place.rows_early = static_cast<int>(left < kChunk ? left : kChunk);
  place.rows_late = static_cast<int>(left <= kChunk ? 0 : left < 2 * kChunk ? left - kChunk : kChunk);
  place.batch = span.batch;
  place.token = span.begin + static_cast<std::int64_t>(index) * kChunk;
  place.chunk = span.chunk_begin + index;
  const auto tile_of = [&](unsigned of) {
    return p.state_tile(p.state_slot(span.chunk_begin, place.n, of), place.kv_head, place.key_tile, 0);
  };
  place.state = tile_of(index);
  place.gradient = tile_of(place.rows_late > 0 ? index + 1 : index);
  return true;
}
// The place after `from` in this block's walk, or one without rows.
__device__ __forceinline__ void find_next(PairPlace& to, const PairPlace& from, const Params& p, unsigned items) {
  to = from;
  ++to.unit;
  if (++to.in_group < p.group) return;
  for (to.item += gridDim.x; to.item < items; to.item += gridDim.x) {
    if (find_pair(to, p)) return;
  }
  to.rows_early = to.rows_late = 0;
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
