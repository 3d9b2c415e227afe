// Gates over values: what the forward's values decay by, and the state's pass over chunks (value_gates.cuh).
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles/prepared.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/forward/two_pass.h"

namespace flashgla::ops::gated_linear_attention::cuda {

// ---- values alone, for the forward: later_v and the chunk's decay ----

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kLaterBlocks = 6;  // a multiprocessor; seven would spill
#else
constexpr int kLaterBlocks = 7;
#endif
static __global__ void __launch_bounds__(kGroupThreads, kLaterBlocks)
    gate_later_kernel(const __grid_constant__ Params p, const __grid_constant__ SplitImages images) {
  flashgla::cuda::wait_for_previous();
  flashgla::cuda::release_next_of_waves();
  extern __shared__ __align__(1024) char shared[];
  gate_later<SplitKernel<void, __nv_bfloat16, 1>>(p, images, shared);
}

// ---- the state's pass over the chunks of a sequence, either way ----

struct GatedPass {
  const char *a, *b;  // images: forwards later_k [chunks,G,key tiles] and later_v; backwards up_q [chunks,H,..], up_do
  const float *key_decays, *value_decays;  // [chunks, G, 64 tiles]: 2^b_C
  char* images;                            // [chunks, G, key tiles, value tiles]: the state before the chunk's step
  const float* start;                      // [N,G,K,V] or null: zeros
  float* end;                              // likewise, or null: not wanted
  float start_factor = 1.0f, end_factor = 1.0f;
  bool backwards = false;
  int heads_each = 1;  // of a and b, a kv head
  int segments = 1;
  bool ends_only = false;           // of all segments but the last walked; nothing else is written
  float* segment_ends = nullptr;    // [segments - 1, tiles of all states, 4096]
  float* segment_decays = nullptr;  // [segments - 1, tiles of all states, 128]: of keys, of values
};

constexpr int kPassStages = 3;
constexpr int gated_pass_stage(int groups) { return (1 + groups) * kTileBytes; }
constexpr int gated_pass_shared(int groups) {
  return kPassStages * (gated_pass_stage(groups) + (1 + groups) * kTile * 4) + groups * kTileBytes;
}

// Grid: (N x G x ceil(value tiles / kGroups) x key tiles, innermost last) x segments; a thread group holds one 64x64
// tile of the state. Chunks are counted in the order of the walk.
template <class Core, int kGroups>
__device__ void pass_gated_state(const Params& p, const GatedPass& pass, char* shared) {
  const int thread = threadIdx.x % kGroupThreads, group = threadIdx.x / kGroupThreads;
  const int key_tiles = tiles_of(p.key_dim), value_tiles = tiles_of(p.value_dim);
  const int blocks = key_tiles * ((value_tiles + kGroups - 1) / kGroups), block = blockIdx.x % blocks;
  const int key_tile = block % key_tiles, value_tile = block / key_tiles * kGroups + group;
  const int kv_head = blockIdx.x / blocks % p.heads;
  const std::int64_t n = blockIdx.x / blocks / p.heads;
  const bool active = value_tile < value_tiles;
  const Span span = span_of(p.sequences, n);
  const std::int64_t chunks = (span.length + kChunk - 1) / kChunk;
  const int segment = blockIdx.y;
  const std::int64_t first = chunks * segment / pass.segments, last = chunks * (segment + 1) / pass.segments;
  char* out = shared + kPassStages * gated_pass_stage(kGroups) + group * kTileBytes;
  // A stage's decays: keys', then each group's values'.
  float* decays = reinterpret_cast<float*>(shared + kPassStages * gated_pass_stage(kGroups) + kGroups * kTileBytes);
  const auto chunk_at = [&](std::int64_t i) { return span.chunk_begin + (pass.backwards ? chunks - 1 - i : i); };

  // What is loaded next: a chunk and a head of it at a time.
  std::int64_t next_chunk = chunk_at(first), left = last - first;
  int next_head = 0, next_slot = 0;
  auto load = [&] {
    if (left > 0) {
      const std::int64_t kv_at = next_chunk * p.heads + kv_head, at = kv_at * pass.heads_each + next_head;
      const std::uint32_t stage = ptx::shared_address(shared) + next_slot * gated_pass_stage(kGroups);
      float* to = decays + next_slot * (1 + kGroups) * kTile;
      if (group == 0) {
        copy_image(stage, pass.a + (at * key_tiles + key_tile) * kTileBytes, thread);
        if (thread < 16) {
          ptx::copy_async_16(ptx::shared_address(to + 4 * thread),
                             pass.key_decays + (kv_at * key_tiles + key_tile) * kTile + 4 * thread);
        }
      }
      if (active) {
        copy_image(stage + (1 + group) * kTileBytes, pass.b + (at * value_tiles + value_tile) * kTileBytes, thread);
        if (thread < 16) {
          ptx::copy_async_16(ptx::shared_address(to + (1 + group) * kTile + 4 * thread),
                             pass.value_decays + (kv_at * value_tiles + value_tile) * kTile + 4 * thread);
        }
      }
      next_slot = next_slot + 1 == kPassStages ? 0 : next_slot + 1;
      if (++next_head == pass.heads_each) {
        next_head = 0;
        next_chunk += pass.backwards ? -1 : 1;
        --left;
      }
    }
    ptx::copy_async_commit();
  };
  load();
  load();

  const int row = row_of_element(thread, 0), column = column_of_element(thread, 0);
  // For before and after the walk: of all states, this block's and, in it, the tile's first key and value channel.
  const auto cell = [&] { return static_cast<std::int64_t>(fresh_block() / blocks); };
  const auto key = [&] { return static_cast<int>(fresh_block() % blocks) % key_tiles * kTile; };
  const auto value = [&] { return (static_cast<int>(fresh_block() % blocks) / key_tiles * kGroups + group) * kTile; };
  const auto decay_by = [&](Accumulator& state, const float* keys, const float* values) {
    const float of_row[2] = {keys[row], keys[row + 8]};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 of_column = *reinterpret_cast<const float2*>(values + 8 * j + column);
      state[4 * j] *= of_row[0] * of_column.x;
      state[4 * j + 1] *= of_row[0] * of_column.y;
      state[4 * j + 2] *= of_row[1] * of_column.x;
      state[4 * j + 3] *= of_row[1] * of_column.y;
    }
  };
  // A sequence without tokens hands its state on to the bit.
  const float start_factor = chunks == 0 ? 1.0f : pass.start_factor, end_factor = chunks == 0 ? 1.0f : pass.end_factor;
  Accumulator state;
  clear(state);
  if (pass.start && segment == 0) {
    read_state(state, pass.start + cell() * p.key_dim * p.value_dim, p.key_dim, p.value_dim, key(), value(), thread);
    scale_rows(state, start_factor, start_factor);
  }
  const auto tile_of = [&](int s) {  // of segment s, among all tiles of all segments
    return ((s * p.sequences.count * p.heads + cell()) * key_tiles + key() / kTile) * value_tiles + value() / kTile;
  };
  const auto segment_end = [&](std::int64_t tile, int part) {  // four of this thread's elements
    return reinterpret_cast<float4*>(pass.segment_ends) + (tile * 8 + part) * kGroupThreads + thread;
  };
  if (!pass.ends_only && active) {
    for (int s = 0; s < segment; ++s) {
      const std::int64_t tile = tile_of(s);
      const float* over = pass.segment_decays + tile * 2 * kTile;
      decay_by(state, over, over + kTile);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float4 end = *segment_end(tile, j);
        state[4 * j] += end.x;
        state[4 * j + 1] += end.y;
        state[4 * j + 2] += end.z;
        state[4 * j + 3] += end.w;
      }
    }
  }

  float product = 1.0f;  // over the segment: of key channel `thread`, or of value channel thread - 64
  int slot = 0;
  for (std::int64_t i = first; i < last; ++i) {
    if (active && !pass.ends_only) {
      const std::int64_t at = ((chunk_at(i) * p.heads + kv_head) * key_tiles + key_tile) * value_tiles + value_tile;
      store_image(pass.images + at * kTileBytes, out, state, thread);
    }
    for (int h = 0; h < pass.heads_each; ++h, slot = slot + 1 == kPassStages ? 0 : slot + 1) {
      ptx::copy_async_wait<1>();
      Core::publish();
      __syncthreads();
      load();
      const std::uint32_t stage = ptx::shared_address(shared) + slot * gated_pass_stage(kGroups);
      if (h == 0) {
        const float *keys = decays + slot * (1 + kGroups) * kTile, *values = keys + (1 + group) * kTile;
        if (active) decay_by(state, keys, values);
        product *= thread < kTile ? keys[thread] : values[thread - kTile];
      }
      Core::begin(state);
      Core::template product<Stored::k_outer, Stored::k_outer>(state, stage, stage + (1 + group) * kTileBytes, thread);
      Core::finish(state);
    }
  }
  ptx::copy_async_wait<0>();
  if (!active) return;
  if (pass.ends_only) {
    const std::int64_t tile = tile_of(segment);
#pragma unroll
    for (int j = 0; j < 8; ++j)
      *segment_end(tile, j) = make_float4(state[4 * j], state[4 * j + 1], state[4 * j + 2], state[4 * j + 3]);
    pass.segment_decays[tile * 2 * kTile + thread] = product;
  } else if (pass.end && segment == pass.segments - 1) {
    scale_rows(state, end_factor, end_factor);
    write_state(pass.end + cell() * p.key_dim * p.value_dim, state, p.key_dim, p.value_dim, key(), value(), thread);
  }
}

template <class Core, int kGroups>
__global__ void __launch_bounds__(kGroupThreads* kGroups, 4 / kGroups)
    pass_gated_state_kernel(const __grid_constant__ Params p, const __grid_constant__ GatedPass pass) {
  flashgla::cuda::wait_for_previous();
  flashgla::cuda::release_next_of_waves();
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Core::available) pass_gated_state<Core, kGroups>(p, pass, shared);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
