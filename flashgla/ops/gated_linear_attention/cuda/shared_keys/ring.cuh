// Stages of shared memory that a warp fills and others empty, and how tiles come there. Use i of them all is of stage
// i % kStages.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/shared_keys/parts.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/tiles/row_maps.h"

namespace flashgla::ops::gated_linear_attention::cuda::shared_keys {

template <class Core, int kStages>
struct Ring {
  std::uint32_t barriers;

  __device__ __forceinline__ std::uint32_t full(int i) const { return barriers + i % kStages * 8; }
  __device__ __forceinline__ std::uint32_t empty(int i) const { return full(i) + kStages * 8; }
  __device__ __forceinline__ void wait_full(int i) const { Core::wait_at(full(i), i / kStages & 1); }
  __device__ __forceinline__ void wait_empty(int i) const { Core::wait_at(empty(i), i / kStages & 1); }
  // By one thread, with how many warps empty a stage; then __syncthreads. Who fills it arrives twice: with the bytes
  // that TMA brings, and when all else is there.
  __device__ __forceinline__ void init(int consumer_warps) const {
    for (int i = 0; i < kStages; ++i) {
      Core::init_barrier(full(i), 2);
      Core::init_barrier(empty(i), consumer_warps);
    }
    Core::publish_barriers();
  }
  // Has been read, and whatever its warp was to leave there is written.
  __device__ __forceinline__ void leave(int i, int lane) const {
    __syncwarp();
    if (lane == 0) Core::arrive(empty(i));
  }
};

// d = a b over a head's key tiles, which lie one after the other; a stored [m][k].
template <class Core, int kTiles, Stored b_stored>
__device__ __forceinline__ void product_over_keys(Accumulator& d, std::uint32_t a, std::uint32_t b, int thread) {
  Core::template product<Stored::k_inner, b_stored, true>(d, a, b, thread);
  if constexpr (kTiles == 2) {
    Core::template product<Stored::k_inner, b_stored>(d, a + kTileBytes, b + kTileBytes, thread);
  }
}

// What brings a chunk's rows to a stage, by one warp. `whole`: by TMA, else in pieces by the warp that asks, for what
// follows the chunk is another sequence's.
template <class Core>
struct Producer {
  const ChunkPlace& place;
  bool whole;
  std::uint32_t barrier;
  int lane;

  __device__ __forceinline__ Producer(const Params& p, const ChunkPlace& at, std::uint32_t full, int own_lane)
      : place(at), whole(at.rows == kChunk || p.sequences.cu_seqlens == nullptr), barrier(full), lane(own_lane) {}

  // Before the first tile: how many tiles of rows will come, and bytes of images.
  __device__ __forceinline__ void expect(int tiles, int image_bytes) const {
    if (lane == 0) Core::expect_bytes(barrier, (whole ? tiles * kTileBytes : 0) + image_bytes);
    __syncwarp();
  }
  // 64 channels.
  __device__ __forceinline__ void copy(std::uint32_t tile, const Strided& x, const RowMap& map, int head,
                                       int channel = 0) const {
    if (whole) {
      if (lane == 0) {
        Core::copy_box(tile, &map.map, channel, place.token, head * map.head_step, place.batch * map.batch_step,
                       barrier);
      }
    } else {
      const Rows rows = rows_of(x, place, head, channel);
#pragma unroll 1
      for (int part = 0; part < 4; ++part) load_tile(tile, rows, lane + 32 * part);
    }
  }
  __device__ __forceinline__ void copy_image(std::uint32_t tile, const void* image, int bytes) const {
    if (lane == 0) Core::copy_in(tile, image, bytes, barrier);
  }
  // All that the warp itself has brought and written is there.
  __device__ __forceinline__ void finish() const {
    if (!whole) {
      ptx::copy_async_commit();
      ptx::copy_async_wait<0>();
      Core::publish();
    }
    __syncwarp();
    if (lane == 0) Core::arrive(barrier);
  }
};

}  // namespace flashgla::ops::gated_linear_attention::cuda::shared_keys
