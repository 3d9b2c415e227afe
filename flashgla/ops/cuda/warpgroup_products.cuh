// Products of warpgroups (wgmma) on tiles in shared memory, for sm_90a alone.
//
// A tile is rows of 64 channels of bf16, 128 bytes each, as TMA's 128-byte swizzle lays them: the 16-byte
// piece p of row r lies at piece p ^ (r % 8). Accumulators of 64 rows: warp w of the group has rows 16w..16w+15, lane l
// of it rows l/4 and l/4+8 and, of each 8 columns, 2(l%4) and the next: element 4 (column / 8) + {0, 1} of the first
// row, + {2, 3} of the second. Rows in registers, the left side: of each 16 channels lane l has four words, channels
// 2(l%4) and the next of its first and of its second row, and those 8 behind of both.
#pragma once

#include "flashgla/base/cuda/ptx.cuh"

namespace flashgla::ops::cuda::warpgroup {

constexpr int kRowBytes = 128;  // of a tile
constexpr int kTileChannels = 64;

__device__ __forceinline__ std::uint32_t piece_at(int row, int piece) {
  return static_cast<std::uint32_t>(row * kRowBytes + ((piece ^ (row & 7)) << 4));
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

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

// One k-step: d (64 x 64 or 64 x 128) = or += a b, with kMinus a's negative. a from shared memory, by channels unless
// told, or from registers.
template <bool kFresh, Reads reads, Reads a_reads = Reads::channels_inner, bool kMinus = false>
__device__ __forceinline__ void multiply(float (&d)[32], std::uint64_t a, std::uint64_t b) {
  if constexpr (kFresh) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " FLASHGLA_R32 ", %32, %33, 0, %34, 1, %35, %36;"
                 : FLASHGLA_D16("=f", d, 0), FLASHGLA_D16("=f", d, 16)
                 : "l"(a), "l"(b), "n"(kMinus ? -1 : 1), "n"(a_reads == Reads::rows_inner),
                   "n"(reads == Reads::rows_inner));
  } else {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " FLASHGLA_R32 ", %32, %33, 1, %34, 1, %35, %36;"
                 : FLASHGLA_D16("+f", d, 0), FLASHGLA_D16("+f", d, 16)
                 : "l"(a), "l"(b), "n"(kMinus ? -1 : 1), "n"(a_reads == Reads::rows_inner),
                   "n"(reads == Reads::rows_inner));
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

#endif

}  // namespace flashgla::ops::cuda::warpgroup
