// Products of warpgroups (wgmma) on tiles in shared memory, for sm_90a alone.
//
// A tile is rows of 64 channels of bf16, 128 bytes each, as TMA's 128-byte swizzle lays them: the 16-byte
// piece p of row r lies at piece p ^ (r % 8). Heads of 128 channels are two tiles, one behind the other. Accumulators
// of 64 rows: warp w of the group has rows 16w..16w+15, lane l of it rows l/4 and l/4+8 and, of each 8 columns, 2(l%4)
// and the next: element 4 (column / 8) + {0, 1} of the first row, + {2, 3} of the second.
#pragma once

#include <cuda.h>

#include "flashgla/base/cuda/ptx.cuh"

namespace flashgla::ops::softmax_attention::cuda::hopper {

constexpr int kGroup = 128;     // threads of a warpgroup
constexpr int kRowBytes = 128;  // of a tile
constexpr int kTileChannels = 64;

__device__ __forceinline__ std::uint32_t piece_at(int row, int piece) {
  return static_cast<std::uint32_t>(row * kRowBytes + ((piece ^ (row & 7)) << 4));
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

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

// How a tile is read: rows are the outer dimension of the product and channels its inner one, or the other way round.
enum class Reads { channels_inner, rows_inner };

// Of what k-step `step` (16 of the inner dimension) reads: start, 1024 bytes between groups of 8 rows, 128-byte
// swizzle.
template <Reads reads>
__device__ __forceinline__ std::uint64_t descriptor(std::uint32_t tile, int step) {
  const std::uint32_t low = (((tile & 0x3ffff) >> 4) | (1u << 16)) + step * (reads == Reads::channels_inner ? 2 : 128);
  return (static_cast<std::uint64_t>((1u << 30) | 64u) << 32) | low;
}

#define FLASHGLA_D16(how, d, i)                                                                                       \
  how(d[i]), how(d[i + 1]), how(d[i + 2]), how(d[i + 3]), how(d[i + 4]), how(d[i + 5]), how(d[i + 6]), how(d[i + 7]), \
      how(d[i + 8]), how(d[i + 9]), how(d[i + 10]), how(d[i + 11]), how(d[i + 12]), how(d[i + 13]), how(d[i + 14]),   \
      how(d[i + 15])
#define FLASHGLA_R32                                                                                                \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29," \
  "%30,%31}"
#define FLASHGLA_R64                                                                                                   \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30" \
  ",%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,"  \
  "%59,%60,%61,%62,%63}"

// One k-step: d (64 x 64 or 64 x 128) = or += a b. a from shared memory, by channels, or from registers.
template <bool kFresh, Reads reads>
__device__ __forceinline__ void multiply(float (&d)[32], std::uint64_t a, std::uint64_t b) {
  if constexpr (kFresh) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " FLASHGLA_R32 ", %32, %33, 0, 1, 1, 0, %34;"
                 : FLASHGLA_D16("=f", d, 0), FLASHGLA_D16("=f", d, 16)
                 : "l"(a), "l"(b), "n"(reads == Reads::rows_inner));
  } else {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " FLASHGLA_R32 ", %32, %33, 1, 1, 1, 0, %34;"
                 : FLASHGLA_D16("+f", d, 0), FLASHGLA_D16("+f", d, 16)
                 : "l"(a), "l"(b), "n"(reads == Reads::rows_inner));
  }
}
template <bool kFresh, Reads reads>
__device__ __forceinline__ void multiply(float (&d)[64], std::uint64_t a, std::uint64_t b) {
  if constexpr (kFresh) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " FLASHGLA_R64 ", %64, %65, 0, 1, 1, 0, %66;"
                 : FLASHGLA_D16("=f", d, 0), FLASHGLA_D16("=f", d, 16), FLASHGLA_D16("=f", d, 32),
                   FLASHGLA_D16("=f", d, 48)
                 : "l"(a), "l"(b), "n"(reads == Reads::rows_inner));
  } else {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " FLASHGLA_R64 ", %64, %65, 1, 1, 1, 0, %66;"
                 : FLASHGLA_D16("+f", d, 0), FLASHGLA_D16("+f", d, 16), FLASHGLA_D16("+f", d, 32),
                   FLASHGLA_D16("+f", d, 48)
                 : "l"(a), "l"(b), "n"(reads == Reads::rows_inner));
  }
}
template <bool kFresh, Reads reads>
__device__ __forceinline__ void multiply(float (&d)[32], const std::uint32_t* a, std::uint64_t b) {
  if constexpr (kFresh) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " FLASHGLA_R32
                 ", {%32,%33,%34,%35}, %36, 0, 1, 1, %37;"
                 : FLASHGLA_D16("=f", d, 0), FLASHGLA_D16("=f", d, 16)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(reads == Reads::rows_inner));
  } else {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " FLASHGLA_R32
                 ", {%32,%33,%34,%35}, %36, 1, 1, 1, %37;"
                 : FLASHGLA_D16("+f", d, 0), FLASHGLA_D16("+f", d, 16)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(reads == Reads::rows_inner));
  }
}
template <bool kFresh, Reads reads>
__device__ __forceinline__ void multiply(float (&d)[64], const std::uint32_t* a, std::uint64_t b) {
  if constexpr (kFresh) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " FLASHGLA_R64 ", {%64,%65,%66,%67}, %68, 0, 1, 1, %69;"
        : FLASHGLA_D16("=f", d, 0), FLASHGLA_D16("=f", d, 16), FLASHGLA_D16("=f", d, 32), FLASHGLA_D16("=f", d, 48)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(reads == Reads::rows_inner));
  } else {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " FLASHGLA_R64 ", {%64,%65,%66,%67}, %68, 1, 1, 1, %69;"
        : FLASHGLA_D16("+f", d, 0), FLASHGLA_D16("+f", d, 16), FLASHGLA_D16("+f", d, 32), FLASHGLA_D16("+f", d, 48)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(reads == Reads::rows_inner));
  }
}
#undef FLASHGLA_D16
#undef FLASHGLA_R32
#undef FLASHGLA_R64

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

// What makes or reads registers of a product must not be moved into its pipeline.
template <int E>
__device__ __forceinline__ void pin(float (&d)[E]) {
#pragma unroll
  for (int i = 0; i < E; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int E>
__device__ __forceinline__ void pin(std::uint32_t (&a)[E]) {
#pragma unroll
  for (int i = 0; i < E; ++i) asm volatile("" : "+r"(a[i])::"memory");
}
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
