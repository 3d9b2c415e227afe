// One pass through time of each sequence, head and 64 key channels: states at the start of every chunk, or, backwards,
// their gradients at the end of every chunk.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/shared_keys/launch.h"
#include "flashgla/ops/gated_linear_attention/cuda/shared_keys/parts.cuh"

namespace flashgla::ops::gated_linear_attention::cuda::shared_keys {

constexpr int kWalkStages = 3;
constexpr int kWalkBytes = kWalkStages * 2 * kTileBytes;

template <bool kBackwards>
__global__ void __launch_bounds__(kGroupThreads, 4)
    walk_kernel(const __grid_constant__ Params p, const __grid_constant__ Walk walk) {
  extern __shared__ __align__(1024) char memory[];
  const std::uint32_t base = ptx::shared_address(memory);
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5;
  const int tiles = tiles_of(p.key_dim), head = static_cast<int>(blockIdx.x) / tiles,
            tile = static_cast<int>(blockIdx.x) % tiles;
  const std::int64_t n = blockIdx.y;
  const Span span = span_of(p.sequences, n);
  const int chunks = static_cast<int>((span.length + kChunk - 1) / kChunk);
  const auto first_of = [&](int step) {
    return static_cast<std::int64_t>(kBackwards ? chunks - 1 - step : step) * kChunk;
  };
  const auto load = [&](int step) {
    if (step < chunks) {
      const ChunkPlace at(span, first_of(step));
      const std::uint32_t stage = base + step % kWalkStages * 2 * kTileBytes;
      load_tile(stage, rows_of(walk.keys, at, 0, tile * kTile), thread);
      load_tile(stage + kTileBytes, rows_of(walk.values, at, head), thread);
    }
    ptx::copy_async_commit();
  };

  const std::int64_t state = (n * p.heads + head) * p.key_dim * kTile;
  Accumulator h;
  read_state(h, walk.start == nullptr ? nullptr : walk.start + state, p.key_dim, kTile, tile * kTile, 0, thread);
  load(0);
  load(1);
  float2 gates = chunks > 0 ? load_gates(p, ChunkPlace(span, first_of(0)), head) : make_float2(0.0f, 0.0f);
#pragma unroll 1
  for (int step = 0; step < chunks; ++step) {
    const GateSums sums = sum_gates(gates, lane);
    if (step + 1 < chunks) gates = load_gates(p, ChunkPlace(span, first_of(step + 1)), head);
    // What a token's values have left at the chunk's end, or, backwards, what its queries see of the chunk's start.
    const float even = ptx::exp2(kBackwards ? sums.first : sums.total - sums.first) * (kBackwards ? p.scale : 1.0f);
    const float odd = ptx::exp2(kBackwards ? sums.second : sums.total - sums.second) * (kBackwards ? p.scale : 1.0f);
    const std::uint32_t keys = base + step % kWalkStages * 2 * kTileBytes, values = keys + kTileBytes;
    ptx::copy_async_wait<1>();
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      const int token = kRowsEach * (thread / 8) + i;
      const float weight = __shfl_sync(kWarp, i % 2 == 0 ? even : odd, token / 2);
      float x[8];
      unpack_8(load_shared_16(values + own_piece(thread, i)), x);
#pragma unroll
      for (int e = 0; e < 8; ++e) x[e] *= weight;
      store_shared_16(values + own_piece(thread, i), pack_8(x));
    }
    __syncthreads();
    load(step + 2);
    char* image = walk.images + p.state_tile(span.chunk_begin + first_of(step) / kChunk, head, tile, 0);
    store_pieces(h, lane,
                 [&](int row, int piece, uint4 x) { store_global_16(image + tile_piece(16 * warp + row, piece), x); });
    const float decay = ptx::exp2(sums.total);
    scale_rows(h, decay, decay);
    TensorCore80::product<Stored::k_outer, Stored::k_outer, false, Loads::in_turn>(h, keys, values, thread);
  }
  if (walk.end != nullptr) write_state(walk.end + state, h, p.key_dim, kTile, tile * kTile, 0, thread);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda::shared_keys
