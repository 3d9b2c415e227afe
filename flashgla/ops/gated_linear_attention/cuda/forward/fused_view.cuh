// What a group of the one-pass forward (forward/fused.cuh) is told once: where its tiles and its part of each tensor
// are, and copies between the two.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/forward/fused_gates.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

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

// Where the next chunk begins in a tensor, in units of 16 bytes: an address is worked out from it and the tensor's by
// one instruction, and it takes one register instead of two. Gates of tokens in elements.
using Place = int;

enum FusedTensor { kFusedQ, kFusedK, kFusedV, kFusedO, kFusedGates, kFusedStates, kFusedTensors };

template <class Core, GatesAs gate, bool kPairs>
struct FusedView {
  static constexpr bool in_f32 = gate == GatesAs::f32, key = gate == GatesAs::bf16 || in_f32;
  static constexpr std::uint32_t v_slots = 4 * kTileBytes, g_slot = 5 * kTileBytes, h_slot = 6 * kTileBytes;
  static constexpr int unit = 16;  // of a Place
  // Of this thread's tokens of the next chunk, as scan_tokens has them. Bits as they lie in memory: what they mean is
  // worked out a chunk later, since that would wait for them.
  static constexpr int kGates = kPairs ? 4 : 2;
  using RawGates = std::uint32_t[kGates];
  const Params& p;
  const int group;
  // Its tiles; and those whose pieces this thread moves: its group's, or both groups' from the first one's on.
  const std::uint32_t base, moved_base;
  const int v0, K, V;

  // The group's sequence, query head and slice; sequence times heads plus query head, anew. One group a head and slice
  // writes the states.
  __device__ __forceinline__ int own_unit() const { return fresh_block() * (blockDim.x / kGroupThreads) + group; }
  __device__ __forceinline__ unsigned own_slices() const {
    return kPairs ? 1u : static_cast<unsigned>(anew(p.value_dim) + 63) / 64;
  }
  __device__ __forceinline__ unsigned own_head() const { return own_unit() / own_slices(); }
  __device__ __forceinline__ bool leads() const { return kPairs || own_head() % p.group == 0; }
  __device__ __forceinline__ float* own_state(const void* states) const {
    return states == nullptr ? nullptr
                             : static_cast<float*>(const_cast<void*>(states)) +
                                   own_head() / p.group * static_cast<std::int64_t>(K) * V;
  }

  // ---- what this thread moves ----
  __device__ __forceinline__ int moved_row(int thread) const {
    return kPairs ? pair_row(group, thread) : kRowsEach * (thread / 8);
  }
  __device__ __forceinline__ std::uint32_t moved_piece(int thread, int i) const {
    return kPairs ? pair_piece(group, thread, i) : own_piece(thread, i);
  }
  // Of this thread's piece of its first row.
  __device__ __forceinline__ int moved_offset(int thread, int stride) const {
    return moved_row(thread) * stride + thread % (kPairs ? 16 : 8) * 16;
  }
  __device__ __forceinline__ void sync_moved() const {  // all that move pieces of this group's tiles
    if constexpr (kPairs) {
      __syncthreads();
    } else {
      sync_fresh_group();
    }
  }

  // ---- places ----
  static __device__ __forceinline__ Place first_place(const Span& span, const Strided& s, int head, int channel,
                                                      int element = 2) {
    return static_cast<Place>((span.batch * s.batch + span.begin * s.token + head * s.head + channel) * element / unit);
  }
  // Of a group's first chunk; sequence n, the kv head, and those whose rows this thread moves.
  static __device__ __forceinline__ void first_places(Place (&places)[kFusedTensors], const Params& p, const Span& span,
                                                      std::int64_t n, int head, int first_head, int first_key_head,
                                                      int v0) {
    places[kFusedQ] = first_place(span, p.q, first_head, 0);
    places[kFusedK] = first_place(span, p.k, first_key_head, 0);
    places[kFusedV] = first_place(span, p.v, first_key_head, v0);
    places[kFusedO] = first_place(span, p.o, first_head, v0);
    places[kFusedGates] =
        in_f32 ? first_place(span, p.g, head, 0, 4)  // each group moves its own
        : key  ? first_place(span, p.g, first_key_head, 0)
        : gate == GatesAs::tokens
            ? static_cast<Place>(span.batch * p.g.batch + span.begin * p.g.token + first_key_head * p.g.head)
            : 0;
    places[kFusedStates] =
        static_cast<Place>(p.state_tile(p.state_slot(span.chunk_begin, n, 0), head, 0, v0 / kTile) / unit);
  }
  // A chunk on.
  static __device__ __forceinline__ Place step_of(const Strided& s) {
    return static_cast<Place>(s.token * (kChunk * 2 / unit));
  }
  static __device__ __forceinline__ Rows rows_at(Place place, const Strided& s, int rows, int channels) {
    return Rows{static_cast<const char*>(s.data) + static_cast<std::int64_t>(place) * unit,
                static_cast<int>(s.token) * 2, rows, channels};
  }

  // ---- copies ----
  // A chunk to its tile `slot` bytes from the group's first.
  __device__ __forceinline__ void load(std::uint32_t slot, Place& next, const Strided& s, int rows,
                                       int channels) const {
    const int thread = fresh_thread();
    const Rows from = rows_at(next, s, rows, channels);
    const int inside = kPairs || thread % 8 * 8 < channels ? rows - moved_row(thread) : 0;
    const char* row = from.data + moved_offset(thread, from.stride);
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {  // without bytes nothing is read
      ptx::copy_async_16(moved_base + slot + moved_piece(thread, i), row + i * from.stride, i < inside ? 16 : 0);
    }
    next += step_of(s);
  }
  // Gates of the next chunk, from where `tokens` are left; in f32 those after it are asked to the L2, and where
  // registers are few one half comes after the other.
  template <class OfHalves>
  __device__ __forceinline__ void load_gates(Place& next, int tokens, OfHalves) const {
    constexpr int kRows = OfHalves::value ? kTile / 2 : kTile;
    if constexpr (in_f32) {
      const int mover = fresh_shuffled();
      const auto rows_of_gates = [&](int rows) {
        Rows from = rows_at(next, p.g, rows, K);
        from.stride *= 2;
        return from;
      };
      const std::uint32_t g_tile = base + g_slot;
      const Rows gates = rows_of_gates(tokens);
      next += 2 * step_of(p.g);
      load_f32_gates<kRows>(g_tile, gates, 0, mover);
      if constexpr (kRows < kTile) load_f32_gates<kRows>(g_tile, gates, kRows, fresh_shuffled());
      ask_for_f32_gates(rows_of_gates(tokens - kChunk), mover);
    } else {
      load(g_slot, next, p.g, min(tokens, kChunk), K);
    }
  }
  // Gates in f32 of pairs may come as they are instead, half of a tile to k's second slot, and be rounded there.
  static constexpr bool may_stage_gates = kPairs && in_f32;
  static constexpr std::uint32_t staged_slot = 3 * kTileBytes;
  __device__ __forceinline__ void stage_gates(Place& next, int tokens) const {
    Rows from = rows_at(next, p.g, min(tokens, kChunk), K);
    from.stride *= 2;
    stage_f32_gates(base + g_slot, base + staged_slot, from, fresh_thread());
    next += 2 * step_of(p.g);
  }
  // Of logits, those that this thread has loaded become gates.
  __device__ __forceinline__ void turn_logits_here(int rows) const {
    const int mover = fresh_thread(), inside = rows - moved_row(mover);
    const GatesOfLogits gates_of(p.logit_scale, p.gate_min);
#pragma unroll 1
    for (int i = 0; i < kRowsEach; ++i) {
      const std::uint32_t at = moved_base + g_slot + moved_piece(mover, i);
      const uint4 gates = gates_of(load_shared_16(at));
      if (i < inside) store_shared_16(at, gates);
    }
  }
  // The pieces of v that this thread has loaded times 2^-sum, in place.
  __device__ __forceinline__ void gate_values(std::uint32_t slot, const TokenSums& sums, int thread) const {
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      const float factor = ptx::exp2(-sums.moved[i]);
      const std::uint32_t at = moved_base + slot + moved_piece(thread, i);
      store_shared_16(at, times_split(load_shared_16(at), factor));
    }
  }
  __device__ __forceinline__ void token_gates(RawGates& bits, Place& next, int rows) const {
    const int lane = fresh_thread() % 32, token = kGates * (kPairs ? lane % 16 : lane);
    const Place step = static_cast<Place>(p.g.token);
    const Place first = next + (kPairs ? lane / 16 * static_cast<Place>(p.g.head) : 0) + token * step;
    const auto read = [&]<class T>(const T* from) {
#pragma unroll
      for (int i = 0; i < kGates; ++i) bits[i] = token + i < rows ? from[i * step] : 0;
    };
    if (p.gate_dtype == DType::f32) {
      read(static_cast<const std::uint32_t*>(p.g.data) + first);
    } else {
      read(static_cast<const std::uint16_t*>(p.g.data) + first);
    }
    next += kChunk * step;
  }
  // q and k of the chunk under way once more, by each warp the rows that it reads; what comes next has been asked for.
  __device__ __forceinline__ void load_again(std::uint32_t q, std::uint32_t k, Place q_next, Place k_next,
                                             int left) const {
    const int ahead = left > kChunk ? 2 : 1;  // chunks
    const Place own = kPairs ? group * (kTile * 2 / unit) : 0;
    const auto load = [&](std::uint32_t tile, Place next, const Strided& s) {
      load_tile(tile, rows_at(next + own - step_of(s) * ahead, s, min(left, kChunk), K), fresh_thread());
    };
    load(q, q_next, p.q);
    load(k, k_next, p.k);
    ptx::copy_async_commit();
    ptx::copy_async_wait<0>();
    __syncwarp();
  }
  __device__ __forceinline__ void write_states(Place& next, int thread) const {
    store_tile_image(static_cast<char*>(p.states) + static_cast<std::int64_t>(next) * unit, base + h_slot, thread);
    // p.state_bytes() a head, of one tile of keys.
    next += static_cast<Place>(anew(p.heads) * tiles_of(alike_shuffled<Core>(p.value_dim)) * (kImageBytes / unit));
  }
  // o of a chunk, or of as many rows as are left, from its tile `slot` bytes from the group's first.
  __device__ __forceinline__ void store_o(Place& next, std::uint32_t slot, int rows, int mover) const {
    const Rows out = rows_at(next, p.o, min(rows, kChunk), V - v0);
    const int inside = kPairs || mover % 8 * 8 < V - v0 ? rows - moved_row(mover) : 0;
    char* to = const_cast<char*>(out.data) + moved_offset(mover, out.stride);
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      if (i < inside) {
        *reinterpret_cast<uint4*>(to + i * out.stride) = load_shared_16(moved_base + slot + moved_piece(mover, i));
      }
    }
    next += step_of(p.o);
  }
};

}  // namespace flashgla::ops::gated_linear_attention::cuda
