// Attention's products of warpgroups on tiles in shared memory (ops/cuda/warpgroup_products.cuh), for sm_90a alone.
// Heads of 128 channels are two tiles, one behind the other.
#pragma once

#include <cuda.h>

#include "flashgla/ops/cuda/warpgroup_products.cuh"

namespace flashgla::ops::softmax_attention::cuda::hopper {

constexpr int kGroup = 128;  // threads of a warpgroup
using ops::cuda::warpgroup::kRowBytes, ops::cuda::warpgroup::kTileChannels, ops::cuda::warpgroup::piece_at;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

using ops::cuda::warpgroup::descriptor, ops::cuda::warpgroup::multiply, ops::cuda::warpgroup::pin;
using ops::cuda::warpgroup::Reads;

constexpr int kOwnBarrier = 1;  // 1, 2, 3: of each group its own (0 is __syncthreads)

// Where one is in a ring of stages.
template <int stages>
struct Ring {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Copies a head's tiles of `bytes` each: one thread.
template <int kTiles>
__device__ __forceinline__ void copy_tiles(std::uint32_t to, int bytes, const CUtensorMap& map, int token, int head,
                                           int batch, std::uint32_t full) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    ptx::copy_box(to + i * bytes, &map, kTileChannels * i, token, head, batch, full);
  }
}

// Barriers of a gradient's block (Plan::barriers): of what it keeps while it walks full and empty, then of each stage.
template <class Plan>
struct GradientBarriers {
  std::uint32_t shared;

  __device__ __forceinline__ std::uint32_t kept_full() const { return shared + Plan::barriers; }
  __device__ __forceinline__ std::uint32_t kept_empty() const { return shared + Plan::barriers + 8; }
  __device__ __forceinline__ std::uint32_t full(int stage) const {
    return shared + Plan::barriers + 8 * (2 + 2 * stage);
  }
  __device__ __forceinline__ std::uint32_t empty(int stage) const {
    return shared + Plan::barriers + 8 * (3 + 2 * stage);
  }
  // Where a stage's tiles begin.
  __device__ __forceinline__ std::uint32_t tiles_at(int offset, int stage) const {
    return shared + offset + stage * Plan::tiles * Plan::tile;
  }
  // arrivals: that fill a stage.
  __device__ __forceinline__ void init(int arrivals) const {
    ptx::mbarrier_init(kept_full(), 1);
    ptx::mbarrier_init(kept_empty(), Plan::groups * 4);
    for (int stage = 0; stage < Plan::stages; ++stage) {
      ptx::mbarrier_init(full(stage), arrivals);
      ptx::mbarrier_init(empty(stage), Plan::groups * 4);
    }
    ptx::fence_barrier_init();
  }
};

// d = a b^T over D channels: a 64 rows of tiles that lie a_tile bytes apart, b all rows of tiles b_tile bytes apart.
template <int D, int E>
__device__ __forceinline__ void scores(float (&d)[E], std::uint32_t a, int a_tile, std::uint32_t b, int b_tile) {
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
    const std::uint64_t left = descriptor<Reads::channels_inner>(a + step / 4 * a_tile, step % 4);
    const std::uint64_t right = descriptor<Reads::channels_inner>(b + step / 4 * b_tile, step % 4);
    if (step == 0) {
      multiply<true, Reads::channels_inner>(d, left, right);
    } else {
      multiply<false, Reads::channels_inner>(d, left, right);
    }
  }
}
// The same with a in registers.
template <int D, int E>
__device__ __forceinline__ void scores(float (&d)[E], const std::uint32_t (&a)[D / 4], std::uint32_t b, int b_tile) {
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
    const std::uint64_t right = descriptor<Reads::channels_inner>(b + step / 4 * b_tile, step % 4);
    if (step == 0) {
      multiply<true, Reads::channels_inner>(d, a + 4 * step, right);
    } else {
      multiply<false, Reads::channels_inner>(d, a + 4 * step, right);
    }
  }
}
// d[i] += a b_i for each tile b_i of 64 channels: a 64 x I in registers, b I rows.
template <int I, int tiles>
__device__ __forceinline__ void combine(float (&d)[tiles][32], const std::uint32_t (&a)[I / 4], std::uint32_t b,
                                        int b_tile) {
#pragma unroll
  for (int step = 0; step < I / 16; ++step) {
#pragma unroll
    for (int i = 0; i < tiles; ++i) {
      multiply<false, Reads::rows_inner>(d[i], a + 4 * step, descriptor<Reads::rows_inner>(b + i * b_tile, step));
    }
  }
}

// 64 rows of tiles as the left side of products.
template <int D>
__device__ __forceinline__ void load_rows(std::uint32_t (&a)[D / 4], std::uint32_t tiles, int tile_bytes, int thread) {
  const int lane = thread & 31, row = (thread >> 5) * 16 + (lane & 15);
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
    std::uint32_t four[4];
    ptx::load_matrix_4(four, tiles + step / 4 * tile_bytes + piece_at(row, 2 * (step % 4) + (lane >> 4)));
#pragma unroll
    for (int i = 0; i < 4; ++i) a[4 * step + i] = four[i];
  }
}

// An accumulator, rounded, as the left side of products.
template <int E>
__device__ __forceinline__ void round_rows(std::uint32_t (&a)[E / 2], const float (&d)[E]) {
#pragma unroll
  for (int i = 0; i < E / 2; ++i) a[i] = ptx::pack_bf16(d[2 * i], d[2 * i + 1]);
}

// The same of all tiles.
template <int tiles>
__device__ __forceinline__ void pin(float (&d)[tiles][32]) {
#pragma unroll
  for (int i = 0; i < tiles; ++i) pin(d[i]);
}

// Rows [begin, end) of a tile of so many rows stay, the others become zeros: their weight is zero, but what is not
// needed need not be finite. By a group's threads; then publish_zeros.
__device__ __forceinline__ void zero_other_rows(std::uint32_t tile, int rows, int begin, int end, int thread) {
  for (int i = thread; i < rows * (kRowBytes / 16); i += kGroup) {
    const int row = i / (kRowBytes / 16);
    if (row >= begin && row < end) continue;
    asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(tile + i * 16), "r"(0) : "memory");
  }
}
__device__ __forceinline__ void publish_zeros(int barrier) {
  ptx::fence_async_proxy();
  ptx::barrier(barrier, kGroup);
}

#endif

}  // namespace flashgla::ops::softmax_attention::cuda::hopper
