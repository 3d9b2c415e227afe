// How 64x64 tiles of bf16 and accumulators of them lie, for a group of 128 threads.
//
// A tile lies in shared memory as 64 rows of 128 bytes whose eight 16-byte pieces are permuted by the row (the
// 128-byte swizzle of TMA and of wgmma; also free of bank conflicts for ldmatrix). Accumulators are laid
// out alike by mma.sync and wgmma: warp w of the group holds rows 16w..16w+15, lane l of it rows l/4 and l/4+8 and,
// of each 8 columns, 2(l%4) and the next. So one kernel source serves both.
#pragma once

#include <type_traits>
#include <utility>

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/common.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

constexpr int kGroupThreads = 128;

using Accumulator = float[32];  // 4 * (8-column block) + {row l/4: 2, row l/4+8: 2}

// Byte offset of element (row, column).
__device__ __forceinline__ std::uint32_t element_offset(int row, int column) {
  return tile_piece(row, column >> 3) + ((column & 7) << 1);
}

// Row and column in the tile of element i of this thread's accumulator.
__device__ __forceinline__ int row_of_element(int thread, int i) {
  return (thread >> 5) * 16 + ((thread & 31) >> 2) + 8 * ((i >> 1) & 1);
}
__device__ __forceinline__ int column_of_element(int thread, int i) { return 8 * (i / 4) + 2 * (thread & 3) + (i & 1); }

__device__ __forceinline__ void clear(Accumulator& a) {
#pragma unroll
  for (int i = 0; i < 32; ++i) a[i] = 0.0f;
}

// Rows lane / 4 and lane / 4 + 8 of the warp times x and y.
__device__ __forceinline__ void scale_rows(Accumulator& a, float x, float y) {
#pragma unroll
  for (int i = 0; i < 32; ++i) a[i] *= i & 2 ? y : x;
}
// Columns 8 j + 2 (lane % 4) and the next times factor(j).
template <class Factor>
__device__ __forceinline__ void scale_columns(Accumulator& a, Factor factor) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 f = factor(j);
    a[4 * j] *= f.x;
    a[4 * j + 1] *= f.y;
    a[4 * j + 2] *= f.x;
    a[4 * j + 3] *= f.y;
  }
}
__device__ __forceinline__ void scale_columns(Accumulator& a, const float2 (&factors)[8]) {
  scale_columns(a, [&](int j) { return factors[j]; });
}

// The thread within its group, threadIdx.x as the compiler does not know it: addresses that depend on it are worked out
// anew instead of being kept, for registers are scarcer than instructions here.
__device__ __forceinline__ int fresh_thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread & (kGroupThreads - 1);  // not negative: no sign to look after
}

// Where a block has several groups that go their own ways: which one this thread is of, as the compiler sees a warp to
// agree on it, and the group's barriers. The block's own is __syncthreads.
__device__ __forceinline__ int own_group() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kGroupThreads, 0);
}
// The same as the compiler does not know it.
__device__ __forceinline__ int fresh_group() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return static_cast<unsigned>(thread) / kGroupThreads;
}
__device__ __forceinline__ void sync_group() {
  ptx::barrier(1 + static_cast<int>(threadIdx.x) / kGroupThreads, kGroupThreads);
}

// The same where no register is to hold the barrier's number.
__device__ __forceinline__ void sync_fresh_group() { ptx::barrier(1 + fresh_group(), kGroupThreads); }
__device__ __forceinline__ bool sync_fresh_group_or(bool predicate) {
  return ptx::barrier_or(1 + fresh_group(), kGroupThreads, predicate);
}

// Slots that are used in turn: which one is next, and whether all have been an odd number of times.
struct Turn {
  int slot = 0, parity = 0;
  __device__ __forceinline__ void step(int slots) {
    if (++slot == slots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// blockIdx.x, likewise.
__device__ __forceinline__ unsigned fresh_block() {
  unsigned block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return block;
}

// What lies in registers, out of the way of a call. The compiler would otherwise keep it in memory all along.
template <class T, int count>
struct Aside {
  T kept[count];
  Aside() = default;
  __device__ __forceinline__ explicit Aside(const T (&x)[count]) { put(x); }
  __device__ __forceinline__ void put(const T (&x)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) kept[i] = x[i];
    asm volatile("" ::"l"(kept) : "memory");
  }
  __device__ __forceinline__ void restore(T (&x)[count]) const {
    asm volatile("" ::: "memory");
#pragma unroll
    for (int i = 0; i < count; ++i) x[i] = kept[i];
  }
};

// What waits, where there are registers enough.
template <class T, int count>
struct Held {
  using Number = std::remove_volatile_t<T>;
  T x[count];
  __device__ __forceinline__ void put(const Number (&from)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) x[i] = from[i];
  }
  __device__ __forceinline__ void get(Number (&to)[count]) const {
#pragma unroll
    for (int i = 0; i < count; ++i) to[i] = x[i];
  }
};
// Local memory by hand, for what a rarely taken path cannot hold: registers too many are spilled in the common path
// too.
template <class T, int count>
struct Local : Held<volatile T, count> {};

// ---- copies ----
// Row strides are below 2^24 elements (backward.cu sees to it), so that offsets within a chunk fit 32 bits.

// rows x columns (a multiple of 8) of a matrix into a tile, zeros elsewhere. Asynchronous.
__device__ __forceinline__ void copy_tile(std::uint32_t tile, const __nv_bfloat16* source, int row_stride, int rows,
                                          int columns, int thread) {
  const int piece = thread & 7, first = thread >> 3, inside = piece * 8 < columns ? rows : 0;
  row_stride = anew(row_stride);
  const __nv_bfloat16* from = source + first * row_stride + piece * 8;
  const std::uint32_t to = tile + tile_piece(first, piece);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    ptx::copy_async_16(to + 16 * 128 * i, from, first + 16 * i < inside ? 16 : 0);  // without bytes nothing is read
    from += 16 * row_stride;
  }
}
// A tile that lies in memory as it lies in shared memory. Asynchronous.
__device__ __forceinline__ void copy_image(std::uint32_t tile, const void* image, int thread) {
  const char* from = static_cast<const char*>(image) + 16 * thread;
  tile += 16 * thread;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    ptx::copy_async_16(tile + 16 * kGroupThreads * i, from + 16 * kGroupThreads * i);
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
