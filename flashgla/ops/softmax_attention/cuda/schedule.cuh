// Which tile of which head a block has. hopper/'s blocks stay on their multiprocessor and take every gridDim.x-th,
// tensor_cores/' have one each.
#pragma once

#include "flashgla/ops/softmax_attention/cuda/call.cuh"

namespace flashgla::ops::softmax_attention::cuda {

// Of packed sequences: tiles of all of them one after the other; sequence -1 behind the last.
struct PackedTile {
  int sequence, tile;
};

struct Schedule {
  const PackedTile* packed;  // null: sequences are rows
  int tiles;                 // of a sequence, or of all packed ones
  int heads;                 // that a tile is for
  int pairs;                 // heads, times sequences that are rows
  int section;               // pairs whose tiles are gone through before others': their keys and values fit the L2
  bool last_first;           // the last tiles have most to do

  __host__ __device__ std::int64_t count() const { return static_cast<std::int64_t>(tiles) * pairs; }

  struct Work {
    int n, head, tile;  // n -1: nothing
  };
  // Those with most to do come first.
  __device__ __forceinline__ Work at(std::int64_t index) const {
    const int before = static_cast<int>(index / (static_cast<std::int64_t>(section) * tiles)) * section;
    const int rest = static_cast<int>(index - static_cast<std::int64_t>(before) * tiles);
    const int together = min(section, pairs - before), pair = before + rest % together;
    const int order = last_first ? tiles - 1 - rest / together : rest / together;
    if (packed == nullptr) return {pair / heads, pair % heads, order};
    const PackedTile tile = packed[order];
    return {tile.sequence, pair, tile.tile};
  }
};

// The tiles of N keys that a tile of kRows queries sees: of the past by rows of the cache, then of the call.
template <int kRows, int N>
struct KeyTiles {
  int past_first, past_count;  // rows N past_first.. of the cache
  int now_first, now_count;    // tokens N now_first.. of the call

  __device__ __forceinline__ KeyTiles(const Call& call, const SequenceOfCall& s, int query) {
    const int end = min(query + kRows, s.length), first = call.first_key(s.position + query, s.position);
    past_first = past_count = 0;
    if (first < s.position) {
      const bool wrapped = s.position > call.rows;
      past_first = wrapped ? 0 : first / N;
      past_count = ((wrapped ? call.rows : s.position) + N - 1) / N - past_first;
    }
    now_first = max(0, first - s.position) / N;
    now_count = (end + N - 1) / N - now_first;
  }
  __device__ __forceinline__ int count() const { return past_count + now_count; }

  // In the order of work: from the queries' own tile back to the call's first, then the past.
  struct Tile {
    bool past;
    int begin;
  };
  __device__ __forceinline__ Tile at(int i) const {
    if (i < now_count) return {false, (now_first + now_count - 1 - i) * N};
    return {true, (past_first + i - now_count) * N};
  }
};

// The tiles of queries that see a tile of keys: tokens N first.. of the call, of each head that shares the keys.
template <int kKeys, int N>
struct QueryTiles {
  int first, count;
  __device__ __forceinline__ QueryTiles(const Call& call, const SequenceOfCall& s, int key) {
    const int last = call.window > 0 ? min(s.length, min(key + kKeys, s.length) - 1 + call.window) : s.length;
    first = key / N;
    count = (last + N - 1) / N - first;
  }
};

// Which keys of a tile a query sees: those at [first, last], counted from `begin`, in a cache that has wrapped also
// those at [older_first, older_last].
struct Sight {
  int first, last, older_first = 0, older_last = -1;

  // Of token `query` of the call, among its own tokens.
  static __device__ __forceinline__ Sight of_call(const Call& call, int query, int begin) {
    return {call.window > 0 ? query - call.window + 1 - begin : -begin, query - begin};
  }
  // Among the cache's rows. The newest of the past lies in row `newest_row`, older ones before it, and in a cache that
  // has wrapped behind it the oldest.
  static __device__ __forceinline__ Sight of_past(const Call& call, const SequenceOfCall& s, int query, int begin) {
    const int first = call.first_key(s.position + query, s.position), newest_row = (s.position - 1) % call.rows;
    const int oldest = s.position - 1 - newest_row;  // the token of row 0
    Sight sight{max(0, first - oldest) - begin, newest_row - begin};
    if (s.position > call.rows) {
      sight.older_first = max(newest_row + 1, first - oldest + call.rows) - begin;
      sight.older_last = call.rows - 1 - begin;
    }
    return sight;
  }
  __device__ __forceinline__ void shift(int by) { first -= by, last -= by, older_first -= by, older_last -= by; }
  __device__ __forceinline__ bool sees(int key) const { return key >= first && key <= last; }
  __device__ __forceinline__ bool sees_older(int key) const { return key >= older_first && key <= older_last; }
};

// Rows [begin, end) of the cache's tile hold tokens that the tile's first query may see, in a cache that has not
// wrapped; all do in one that has.
struct Filled {
  int begin, end;
};
template <int N>
__device__ __forceinline__ Filled filled_rows(const Call& call, const SequenceOfCall& s, int query, int begin) {
  if (s.position > call.rows) return {0, min(N, call.rows - begin)};
  return {max(0, call.first_key(s.position + query, s.position) - begin), min(N, s.position - begin)};
}

}  // namespace flashgla::ops::softmax_attention::cuda
