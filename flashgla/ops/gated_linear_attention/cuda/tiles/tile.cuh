// Products of 64x64 tiles of bf16 by a group of 128 threads: the building block of the chunked backward.
//
// A tile lies in shared memory as 64 rows of 128 bytes whose eight 16-byte pieces are permuted by the row (the
// 128-byte swizzle of the copy engine and of wgmma; also free of bank conflicts for ldmatrix). Accumulators are laid
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
__device__ __forceinline__ bool sync_group_or(bool predicate) {
  return ptx::barrier_or(1 + static_cast<int>(threadIdx.x) / kGroupThreads, kGroupThreads, predicate);
}

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

// Local memory by hand, for what a rarely taken path cannot hold: registers too many are spilled in the common path
// too.
template <class T, int count>
struct Local {
  volatile T x[count];
  __device__ __forceinline__ void put(const T (&from)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) x[i] = from[i];
  }
  __device__ __forceinline__ void get(T (&to)[count]) const {
#pragma unroll
    for (int i = 0; i < count; ++i) to[i] = x[i];
  }
};

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

// Puts an accumulator into a tile, rounded to bf16. Each warp writes its own 16 rows only.
__device__ __forceinline__ void put_tile(char* tile, const Accumulator& a, int thread) {
  const int lane = thread & 31, row = (thread >> 5) * 16 + (lane >> 2);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int at = (lane & 3) * 4;
    *reinterpret_cast<std::uint32_t*>(tile + tile_piece(row, j) + at) = ptx::pack_bf16(a[4 * j], a[4 * j + 1]);
    *reinterpret_cast<std::uint32_t*>(tile + tile_piece(row + 8, j) + at) = ptx::pack_bf16(a[4 * j + 2], a[4 * j + 3]);
  }
}
// An accumulator to memory as a tile image, through `tile`.
__device__ __forceinline__ void store_image(void* image, char* tile, const Accumulator& a, int thread) {
  put_tile(tile, a, thread);
  __syncwarp();
  const int lane = thread & 31, begin = (thread >> 5) * 2048;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int at = begin + (lane + 32 * i) * 16;
    *reinterpret_cast<uint4*>(static_cast<char*>(image) + at) = *reinterpret_cast<const uint4*>(tile + at);
  }
  __syncwarp();
}

// ---- products ----
// How an operand's tile is stored: a's as [m][k] or [k][m], b's as [n][k] or [k][n], first index the row.
enum class Stored { k_inner, k_outer };
// When mma.sync loads operands: as far ahead as there are registers, or half a product at a time, where the registers
// that loads far ahead take would spill others.
enum class Loads { ahead, in_turn };

// mma.sync: sm_80 and later.
struct TensorCore80 {
  static constexpr bool available = true;
  static constexpr bool copies_in_bulk = false;
  // Between begin and finish lie products only; both name the registers these use (accumulators that go on, operands).
  template <class... Registers>
  static __device__ __forceinline__ void begin(Registers&...) {}  // operands are written, barrier passed
  template <class... Registers>
  static __device__ __forceinline__ void finish(Registers&...) {}  // accumulators may be read, operands overwritten
  static __device__ __forceinline__ void publish() {}  // before the barrier after ordinary writes to operands
  // Products in flight by groups: commit ends a group, wait leaves at most the latest `pending` unfinished.
  static __device__ __forceinline__ void commit() {}
  template <int pending, class... Registers>
  static __device__ __forceinline__ void wait(Registers&...) {}
  // Operand k16 of a product, as load_a gives it, into a tile: the warp's own 16 rows.
  static __device__ __forceinline__ void put_fragment(std::uint32_t tile, const std::uint32_t (&r)[4], int k16,
                                                      int thread) {
    const int lane = thread & 31, row = (thread >> 5) * 16 + (lane >> 2);
    __syncwarp();  // other lanes may have read what is written over
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t at = tile + tile_piece(row + 8 * (i & 1), 2 * k16 + (i >> 1)) + 4 * (lane & 3);
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(r[i]) : "memory");
    }
  }

  // The same transposed: the operand's columns become rows 16 k16.., the warp's 16 rows their columns.
  static __device__ __forceinline__ void put_fragment_transposed(std::uint32_t tile, const std::uint32_t (&r)[4],
                                                                 int k16, int thread) {
    const int lane = thread & 31, warp = thread >> 5;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t x = ptx::transpose_matrix(r[i]);
      const int row = 16 * k16 + 8 * (i >> 1) + (lane >> 2);
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(tile + tile_piece(row, 2 * warp + (i & 1)) + 4 * (lane & 3)), "r"(x)
                   : "memory");
    }
  }

  template <Stored stored>
  static __device__ __forceinline__ void load_a(std::uint32_t (&r)[4], std::uint32_t tile, int k16, int thread) {
    const int lane = thread & 31, m = (thread >> 5) * 16;
    if constexpr (stored == Stored::k_inner) {
      ptx::load_matrix_4(r, tile + tile_piece(m + (lane & 15), 2 * k16 + (lane >> 4)));
    } else {
      const int row = 16 * k16 + (lane & 7) + ((lane & 16) ? 8 : 0);
      ptx::load_matrix_4_transposed(r, tile + tile_piece(row, (m >> 3) + ((lane >> 3) & 1)));
    }
  }
  // Columns 8j..8j+15.
  template <Stored stored>
  static __device__ __forceinline__ void load_b(std::uint32_t (&r)[4], std::uint32_t tile, int k16, int j, int thread) {
    const int lane = thread & 31;
    if constexpr (stored == Stored::k_inner) {
      ptx::load_matrix_4(r, tile + tile_piece(8 * j + (lane & 7) + ((lane & 16) ? 8 : 0), 2 * k16 + ((lane >> 3) & 1)));
    } else {
      ptx::load_matrix_4_transposed(r,
                                    tile + tile_piece(16 * k16 + (lane & 7) + ((lane & 8) ? 8 : 0), j + (lane >> 4)));
    }
  }
  static __device__ __forceinline__ void multiply(float* d, const std::uint32_t (&a)[4], std::uint32_t b0,
                                                  std::uint32_t b1) {
    ptx::mma_bf16(*reinterpret_cast<float(*)[4]>(d), a, b0, b1);
  }

  template <Stored a_stored, Stored b_stored, bool kFresh = false, Loads kLoads = Loads::ahead>
  static __device__ __forceinline__ void product(Accumulator& d, std::uint32_t a_tile, std::uint32_t b_tile,
                                                 int thread) {
    if constexpr (kFresh) clear(d);
#pragma unroll
    for (int k16 = 0; k16 < 4; ++k16) {
      if (kLoads == Loads::in_turn && k16 % 2 == 0) __syncwarp();
      std::uint32_t a[4], b[4];
      load_a<a_stored>(a, a_tile, k16, thread);
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        load_b<b_stored>(b, b_tile, k16, j, thread);
        multiply(d + 4 * j, a, b[0], b[1]);
        multiply(d + 4 * j + 4, a, b[2], b[3]);
      }
    }
  }
  // d += a b for each d with a b of its own: tiles that lie one after the other, stored [n][k], as a is [m][k].
  template <class... Accumulators>
  static __device__ __forceinline__ void products_side_by_side(std::uint32_t a_tile, std::uint32_t b_tiles, int thread,
                                                               Accumulators&... d) {
    ((product<Stored::k_inner, Stored::k_inner>(d, a_tile, b_tiles, thread), b_tiles += kTileBytes), ...);
  }
  // a: an accumulator rounded to bf16.
  template <Stored b_stored, bool kFresh = false, Loads kLoads = Loads::ahead>
  static __device__ __forceinline__ void product(Accumulator& d, const std::uint32_t (&a)[16], std::uint32_t b_tile,
                                                 int thread) {
    if constexpr (kFresh) clear(d);
#pragma unroll
    for (int k16 = 0; k16 < 4; ++k16) {
      if (kLoads == Loads::in_turn) __syncwarp();
      const std::uint32_t fragment[4] = {a[4 * k16], a[4 * k16 + 1], a[4 * k16 + 2], a[4 * k16 + 3]};
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        std::uint32_t b[4];
        load_b<b_stored>(b, b_tile, k16, j, thread);
        multiply(d + 4 * j, fragment, b[0], b[1]);
        multiply(d + 4 * j + 4, fragment, b[2], b[3]);
      }
    }
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// wgmma reads both operands from shared memory, once a group instead of once a warp.
struct TensorCore90 {
  static constexpr bool available = true;
  static constexpr bool copies_in_bulk = true;  // the copy engine with its barriers is there too
  // The compiler must not move what makes or reads registers of a product into its pipeline.
  template <int count>
  static __device__ __forceinline__ void pin(float (&a)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) asm volatile("" : "+f"(a[i])::"memory");
  }
  static __device__ __forceinline__ void pin(std::uint32_t (&a)[16]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(a[i])::"memory");
  }
  template <class... Registers>
  static __device__ __forceinline__ void begin(Registers&... registers) {
    (pin(registers), ...);
    ptx::wgmma_fence();
  }
  template <class... Registers>
  static __device__ __forceinline__ void finish(Registers&... registers) {
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    (pin(registers), ...);
  }
  static __device__ __forceinline__ void publish() { ptx::fence_async_proxy(); }
  static __device__ __forceinline__ void commit() { ptx::wgmma_commit(); }
  template <int pending, class... Registers>
  static __device__ __forceinline__ void wait(Registers&... registers) {
    ptx::wgmma_wait<pending>();
    (pin(registers), ...);
  }
  // The copy engine, told by one thread, and mbarriers (8 bytes each) that count what it has brought or who has come.
  static __device__ __forceinline__ void init_barrier(std::uint32_t barrier, int arrivals) {
    ptx::mbarrier_init(barrier, arrivals);
  }
  static __device__ __forceinline__ void publish_barriers() { ptx::fence_barrier_init(); }
  static __device__ __forceinline__ void arrive(std::uint32_t barrier) { ptx::mbarrier_arrive(barrier); }
  static __device__ __forceinline__ void expect_bytes(std::uint32_t barrier, int bytes) {
    ptx::mbarrier_arrive_expect(barrier, bytes);
  }
  static __device__ __forceinline__ void copy_in(std::uint32_t to, const void* from, int bytes, std::uint32_t barrier) {
    ptx::copy_bulk(to, from, bytes, barrier);
  }
  // The box of a tensor map from these coordinates on.
  static __device__ __forceinline__ void copy_box(std::uint32_t to, const void* map, int channel, int token, int head,
                                                  int batch, std::uint32_t barrier) {
    ptx::copy_box(to, map, channel, token, head, batch, barrier);
  }
  // And from a tile to memory, as copy_out: what lies outside the tensor is not written.
  static __device__ __forceinline__ void copy_box_out(const void* map, int channel, int token, int head, int batch,
                                                      std::uint32_t from) {
    ptx::store_box(map, channel, token, head, batch, from);
  }
  static __device__ __forceinline__ void wait_at(std::uint32_t barrier, int parity) {
    ptx::mbarrier_wait(barrier, parity);
  }
  // Blocks of a cluster. There: where in the block of that rank lies what is at this address here.
  static __device__ __forceinline__ std::uint32_t there(std::uint32_t address, int rank) {
    return ptx::cluster_address(address, static_cast<std::uint32_t>(rank));
  }
  static __device__ __forceinline__ void arrive_there(std::uint32_t barrier) { ptx::mbarrier_arrive_cluster(barrier); }
  static __device__ __forceinline__ void expect_bytes_there(std::uint32_t barrier, int bytes) {
    ptx::mbarrier_arrive_expect_cluster(barrier, bytes);
  }
  static __device__ __forceinline__ void copy_there(std::uint32_t to, std::uint32_t from, int bytes,
                                                    std::uint32_t barrier) {
    ptx::copy_bulk_cluster(to, from, bytes, barrier);
  }
  // All their threads, in two halves: who waits finds the barriers that were published before. Nothing else is ordered.
  static __device__ __forceinline__ void arrive_at_cluster() { ptx::cluster_arrive(); }
  static __device__ __forceinline__ void wait_for_cluster() { ptx::cluster_wait(); }
  // Arrives when what this thread has asked for by copy_async is there.
  static __device__ __forceinline__ void arrive_after_copies(std::uint32_t barrier) {
    ptx::mbarrier_arrive_after_copies(barrier);
  }
  // From shared memory, in groups; waiting is for the latest group to have been read.
  static __device__ __forceinline__ void copy_out(void* to, std::uint32_t from, int bytes) {
    ptx::store_bulk(to, from, bytes);
  }
  static __device__ __forceinline__ void commit_copies_out() { ptx::store_bulk_commit(); }
  static __device__ __forceinline__ void wait_for_copies_out() { ptx::store_bulk_wait_read(); }
  // A group gives or takes registers, so many a thread.
  template <int registers>
  static __device__ __forceinline__ void give() {
    ptx::give_registers<registers>();
  }
  template <int registers>
  static __device__ __forceinline__ void take() {
    ptx::take_registers<registers>();
  }
  static __device__ __forceinline__ void put_fragment(std::uint32_t tile, const std::uint32_t (&r)[4], int k16,
                                                      int thread) {
    const int lane = thread & 31;
    ptx::store_matrix_4(tile + tile_piece((thread >> 5) * 16 + (lane & 15), 2 * k16 + (lane >> 4)), r[0], r[1], r[2],
                        r[3]);
  }

  static __device__ __forceinline__ void put_fragment_transposed(std::uint32_t tile, const std::uint32_t (&r)[4],
                                                                 int k16, int thread) {
    const int lane = thread & 31, row = 16 * k16 + (lane & 7) + ((lane & 16) ? 8 : 0);
    ptx::store_matrix_4_transposed(tile + tile_piece(row, 2 * (thread >> 5) + ((lane >> 3) & 1)), r[0], r[1], r[2],
                                   r[3]);
  }

  // Of the part of a tile that k-step k16 reads: start address, distance of groups of 8 rows (1024 bytes), 128-byte
  // swizzle.
  static __device__ __forceinline__ std::uint64_t descriptor(Stored stored, std::uint32_t tile, int k16) {
    const std::uint32_t low = (((tile & 0x3ffff) >> 4) | (1u << 16)) + k16 * (stored == Stored::k_inner ? 2 : 128);
    return (static_cast<std::uint64_t>((1u << 30) | 64u) << 32) | low;
  }
#define FLASHGLA_ACCUMULATOR(how, d)                                                                              \
  how(d[0]), how(d[1]), how(d[2]), how(d[3]), how(d[4]), how(d[5]), how(d[6]), how(d[7]), how(d[8]), how(d[9]),   \
      how(d[10]), how(d[11]), how(d[12]), how(d[13]), how(d[14]), how(d[15]), how(d[16]), how(d[17]), how(d[18]), \
      how(d[19]), how(d[20]), how(d[21]), how(d[22]), how(d[23]), how(d[24]), how(d[25]), how(d[26]), how(d[27]), \
      how(d[28]), how(d[29]), how(d[30]), how(d[31])
#define FLASHGLA_REGISTERS                                                                                          \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29," \
  "%30,%31}"
  // d += a b, or with kFresh d = a b.
  template <Stored a_stored, Stored b_stored, bool kFresh = false, Loads kLoads = Loads::ahead>
  static __device__ __forceinline__ void product(Accumulator& d, std::uint32_t a_tile, std::uint32_t b_tile, int) {
    steps<a_stored, b_stored, 0, 4, kFresh>(d, a_tile, b_tile);
  }
  // Of a product k-steps kFirst .. kFirst + kCount - 1 alone.
  template <Stored a_stored, Stored b_stored, int kFirst, int kCount, bool kFresh = false>
  static __device__ __forceinline__ void steps(Accumulator& d, std::uint32_t a_tile, std::uint32_t b_tile) {
#pragma unroll
    for (int k16 = kFirst; k16 < kFirst + kCount; ++k16) {
      const std::uint64_t a = descriptor(a_stored, a_tile, k16), b = descriptor(b_stored, b_tile, k16);
      if (kFresh && k16 == kFirst) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " FLASHGLA_REGISTERS
                     ", %32, %33, 0, 1, 1, %34, %35;"
                     : FLASHGLA_ACCUMULATOR("=f", d)
                     : "l"(a), "l"(b), "n"(a_stored == Stored::k_outer), "n"(b_stored == Stored::k_outer));
      } else {
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " FLASHGLA_REGISTERS
                     ", %32, %33, 1, 1, 1, %34, %35;"
                     : FLASHGLA_ACCUMULATOR("+f", d)
                     : "l"(a), "l"(b), "n"(a_stored == Stored::k_outer), "n"(b_stored == Stored::k_outer));
      }
    }
  }
  // d += a b for each d with a b of its own: tiles that lie one after the other, stored [n][k], as a is [m][k]. One
  // wide product: a is read once.
  static __device__ __forceinline__ void products_side_by_side(std::uint32_t a_tile, std::uint32_t b_tiles, int,
                                                               Accumulator& d0, Accumulator& d1, Accumulator& d2) {
#pragma unroll
    for (int k16 = 0; k16 < 4; ++k16) {
      const std::uint64_t a = descriptor(Stored::k_inner, a_tile, k16), b = descriptor(Stored::k_inner, b_tiles, k16);
      asm volatile(
          "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 "
          "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
          "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
          "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
          "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
          "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
          "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95}"
          ", %96, %97, 1, 1, 1, 0, 0;"
          : FLASHGLA_ACCUMULATOR("+f", d0), FLASHGLA_ACCUMULATOR("+f", d1), FLASHGLA_ACCUMULATOR("+f", d2)
          : "l"(a), "l"(b));
    }
  }
  template <Stored b_stored, bool kFresh = false, Loads kLoads = Loads::ahead>
  static __device__ __forceinline__ void product(Accumulator& d, const std::uint32_t (&a)[16], std::uint32_t b_tile,
                                                 int) {
    steps<b_stored, 0, 4, kFresh>(d, a, b_tile);
  }
  // Of a product k-steps kFirst .. kFirst + kCount - 1 alone.
  template <Stored b_stored, int kFirst, int kCount, bool kFresh = false>
  static __device__ __forceinline__ void steps(Accumulator& d, const std::uint32_t (&a)[16], std::uint32_t b_tile) {
#pragma unroll
    for (int k16 = kFirst; k16 < kFirst + kCount; ++k16) {
      const std::uint64_t b = descriptor(b_stored, b_tile, k16);
      if (kFresh && k16 == kFirst) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " FLASHGLA_REGISTERS
                     ", {%32,%33,%34,%35}, %36, 0, 1, 1, %37;"
                     : FLASHGLA_ACCUMULATOR("=f", d)
                     : "r"(a[4 * k16]), "r"(a[4 * k16 + 1]), "r"(a[4 * k16 + 2]), "r"(a[4 * k16 + 3]), "l"(b),
                       "n"(b_stored == Stored::k_outer));
      } else {
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " FLASHGLA_REGISTERS
                     ", {%32,%33,%34,%35}, %36, 1, 1, 1, %37;"
                     : FLASHGLA_ACCUMULATOR("+f", d)
                     : "r"(a[4 * k16]), "r"(a[4 * k16 + 1]), "r"(a[4 * k16 + 2]), "r"(a[4 * k16 + 3]), "l"(b),
                       "n"(b_stored == Stored::k_outer));
      }
    }
  }
  // Columns 8 kFirst .. 8 kFirst + 15 of a b, from rows of b's tile, stored [n][k].
  template <int kFirst>
  static __device__ __forceinline__ void sixteen_columns(float (&c)[8], const std::uint32_t (&a)[16],
                                                         std::uint32_t b_tile) {
#pragma unroll
    for (int k16 = 0; k16 < 4; ++k16) {
      const std::uint64_t b = descriptor(Stored::k_inner, b_tile + 1024 * kFirst, k16);
      if (k16 == 0) {
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, 0, "
            "1, 1, 0;"
            : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3]), "=f"(c[4]), "=f"(c[5]), "=f"(c[6]), "=f"(c[7])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
      } else {
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, 1, "
            "1, 1, 0;"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
            : "r"(a[4 * k16]), "r"(a[4 * k16 + 1]), "r"(a[4 * k16 + 2]), "r"(a[4 * k16 + 3]), "l"(b));
      }
    }
  }
  // d += a b, or d -= a b, with a's part of k-step k16 where a_at(k16) says; b stored [k][n].
  template <bool kFresh, bool kMinus, class Place>
  static __device__ __forceinline__ void product_of(Accumulator& d, Place a_at, std::uint32_t b_tile) {
#pragma unroll
    for (int k16 = 0; k16 < 4; ++k16) {
      const std::uint64_t a = a_at(k16), b = descriptor(Stored::k_outer, b_tile, k16);
      if (kFresh && k16 == 0) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " FLASHGLA_REGISTERS
                     ", %32, %33, 0, %34, 1, 0, 1;"
                     : FLASHGLA_ACCUMULATOR("=f", d)
                     : "l"(a), "l"(b), "n"(kMinus ? -1 : 1));
      } else {
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " FLASHGLA_REGISTERS
                     ", %32, %33, 1, %34, 1, 0, 1;"
                     : FLASHGLA_ACCUMULATOR("+f", d)
                     : "l"(a), "l"(b), "n"(kMinus ? -1 : 1));
      }
    }
  }
#undef FLASHGLA_ACCUMULATOR
#undef FLASHGLA_REGISTERS
};
#else
struct TensorCore90 {
  static constexpr bool available = false;  // kernels compile to nothing
};
#endif

// What is known already; with mma.sync, whose operands go through registers, find(), so that it is not held until then.
template <class Core, class T, class Find>
__device__ __forceinline__ T again(const T& known, Find find) {
  if constexpr (std::is_same_v<Core, TensorCore80>) {
    return find();
  } else {
    return known;
  }
}
template <class Core>
__device__ __forceinline__ int thread_again(int thread) {
  return again<Core>(thread, fresh_thread);
}
// Likewise the thread within its group, and what is the same in all lanes; a whole warp asks for them together. ptxas
// sees that arithmetic on special registers and parameters is the same again, and holds or spills what comes of it, but
// not through a shuffle.
template <class Core>
__device__ __forceinline__ int thread_shuffled(int thread) {
  return again<Core>(thread, [] {
    int same;
    asm volatile("shfl.sync.bfly.b32 %0, %1, 0, 31, -1;" : "=r"(same) : "r"(threadIdx.x));
    return same & (kGroupThreads - 1);
  });
}
__device__ __forceinline__ int fresh_shuffled() { return thread_shuffled<TensorCore80>(0); }
template <class Core, class T>
__device__ __forceinline__ T alike_shuffled(T x) {
  return again<Core>(x, [x] { return __shfl_sync(0xffffffffu, x, 0); });
}

// How the kernels of a call after its first are launched.
template <class Core>
constexpr flashgla::cuda::Begin kNext =
    std::is_same_v<Core, TensorCore90> ? flashgla::cuda::Begin::beside_previous : flashgla::cuda::Begin::after_previous;

// Pairs of bf16 times factors that are the sums of two, rounded once.
__device__ __forceinline__ std::uint32_t times_split(std::uint32_t x, std::uint32_t high, std::uint32_t low) {
  constexpr std::uint32_t negative_zeros = 0x80008000;
  return ptx::fma_bf16(x, high, ptx::fma_bf16(x, low, negative_zeros));
}

// An accumulator as the a operand of a product: in k-steps of 16, the four registers of each.
__device__ __forceinline__ void to_operand(std::uint32_t (&operand)[16], const Accumulator& a) {
#pragma unroll
  for (int i = 0; i < 16; ++i) operand[i] = ptx::pack_bf16(a[2 * i], a[2 * i + 1]);
}

// A tile as an operand, the warp's own 16 rows: pairs of elements where an accumulator has them.
template <Stored stored>
__device__ __forceinline__ void load_operand(std::uint32_t (&operand)[16], std::uint32_t tile, int thread) {
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    std::uint32_t r[4];
    TensorCore80::load_a<stored>(r, tile, k16, thread);
#pragma unroll
    for (int i = 0; i < 4; ++i) operand[4 * k16 + i] = r[i];
  }
}
// And back; kTransposed: rows become columns.
template <class Core, bool kTransposed = false>
__device__ __forceinline__ void put_operand(std::uint32_t tile, const std::uint32_t (&operand)[16], int thread) {
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    const std::uint32_t r[4] = {operand[4 * k16], operand[4 * k16 + 1], operand[4 * k16 + 2], operand[4 * k16 + 3]};
    if constexpr (kTransposed) {
      Core::put_fragment_transposed(tile, r, k16, thread);
    } else {
      Core::put_fragment(tile, r, k16, thread);
    }
  }
}

// The pairs that count of columns 16 k16 .. of an accumulator [query][key] (transposed: [key][query]), rounded, as a
// k-step of an operand: queries at or after their key.
__device__ __forceinline__ void select_block(std::uint32_t (&operand)[16], const float (&a)[8], int k16,
                                             bool transposed, int thread) {
  const int warp = thread / 32, row = thread % 32 / 4, column = 2 * (thread % 4);
  // Of an 8x8 block on the diagonal.
  const std::uint32_t low = (transposed ? column >= row : row >= column) ? 0xffffu : 0u,
                      high = (transposed ? column + 1 >= row : row >= column + 1) ? 0xffff0000u : 0u;
  const bool all = transposed ? k16 > warp : k16 < warp, some = all || k16 == warp;
  const std::uint32_t mask = all ? ~0u : some ? low | high : 0u;
  std::uint32_t x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = ptx::pack_bf16(a[2 * i], a[2 * i + 1]);
  operand[4 * k16] = x[0] & mask;
  operand[4 * k16 + 1] = (transposed ? all : some) ? x[1] : 0u;
  operand[4 * k16 + 2] = (transposed ? some : all) ? x[2] : 0u;
  operand[4 * k16 + 3] = x[3] & mask;
}
// Of all columns.
__device__ __forceinline__ void select_pairs(std::uint32_t (&operand)[16], const Accumulator& a, bool transposed,
                                             int thread) {
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    select_block(operand, reinterpret_cast<const float(&)[8]>(a[8 * k16]), k16, transposed, thread);
  }
}
template <bool kTransposed>
__device__ __forceinline__ void select_pairs(std::uint32_t (&operand)[16], const Accumulator& a, int thread) {
  select_pairs(operand, a, kTransposed, thread);
}

// An accumulator, rounded, to a tile; each warp writes its own 16 rows.
template <class Core>
__device__ __forceinline__ void put_rounded(std::uint32_t tile, const Accumulator& a, int thread) {
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    std::uint32_t r[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) r[i] = ptx::pack_bf16(a[8 * k16 + 2 * i], a[8 * k16 + 2 * i + 1]);
    Core::put_fragment(tile, r, k16, thread);
  }
}

// Ones at [row][column] where column <= row (upper: column >= row; below: column < row), as an operand: its product
// with a tile of [token][channel] is the running sum over tokens, from the first one (upper: from the last).
enum class Triangle { lower, upper, below };
template <Triangle kTriangle>
__device__ __forceinline__ void triangle_of_ones(std::uint32_t (&operand)[16], int thread) {
  constexpr std::uint32_t ones = 0x3f803f80, low_one = 0x00003f80, high_one = 0x3f800000;
  constexpr bool kUpper = kTriangle == Triangle::upper;
  const int warp = thread / 32, row = thread % 32 / 4, column = 2 * (thread % 4);
  // Of an 8x8 block on the diagonal.
  const std::uint32_t upper = column > row ? ones : column + 1 == row ? high_one : column == row ? ones : 0;
  const int end = kTriangle == Triangle::below ? row : row + 1;  // columns before it
  const std::uint32_t lower = column + 1 < end ? ones : column < end ? low_one : 0;
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    const bool before = kUpper ? k16 > warp : k16 < warp, on = k16 == warp;
    operand[4 * k16] = operand[4 * k16 + 3] = before ? ones : on ? (kUpper ? upper : lower) : 0;
    operand[4 * k16 + (kUpper ? 2 : 1)] = before || on ? ones : 0;
    operand[4 * k16 + (kUpper ? 1 : 2)] = before ? ones : 0;
  }
}
// Sums over the rows of a tile of the columns that are this thread's rows in an accumulator.
__device__ __forceinline__ float2 sum_rows_of_tile(std::uint32_t tile, int thread) {
  constexpr std::uint32_t ones = 0x3f803f80;
  float sums[4] = {};
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    std::uint32_t a[4];
    TensorCore80::load_a<Stored::k_outer>(a, tile, k16, thread);
    TensorCore80::multiply(sums, a, ones, ones);
  }
  return make_float2(sums[0], sums[2]);
}

// ---- the state of 64 key channels by 64 value channels: an accumulator whose rows are key channels ----

// Two neighbours 4 * kAt bytes after a place, from memory or to it: both at once where `in_pairs` exceeds kAt, else
// each where `alone` exceeds kAt and kAt + 1. Predicates, not branches: a state has hundreds.
template <bool store, int kAt>
__device__ __forceinline__ void move_two(float& x, float& y, float* place, int in_pairs, int alone) {
  if constexpr (store) {
    asm volatile(
        "{\n"
        ".reg .pred both, first, second;\n"
        "setp.gt.s32 both, %3, %5;\n"
        "setp.gt.s32 first, %4, %5;\n"
        "setp.gt.s32 second, %4, %6;\n"
        "@both st.global.v2.f32 [%2 + %7], {%0, %1};\n"
        "@first st.global.f32 [%2 + %7], %0;\n"
        "@second st.global.f32 [%2 + %8], %1;\n"
        "}" ::"f"(x),
        "f"(y), "l"(place), "r"(in_pairs), "r"(alone), "n"(kAt), "n"(kAt + 1), "n"(4 * kAt), "n"(4 * kAt + 4)
        : "memory");
  } else {
    asm volatile(
        "{\n"
        ".reg .pred both, first, second;\n"
        "setp.gt.s32 both, %3, %5;\n"
        "setp.gt.s32 first, %4, %5;\n"
        "setp.gt.s32 second, %4, %6;\n"
        "@both ld.global.v2.f32 {%0, %1}, [%2 + %7];\n"
        "@first ld.global.f32 %0, [%2 + %7];\n"
        "@second ld.global.f32 %1, [%2 + %8];\n"
        "}"
        : "+f"(x), "+f"(y)
        : "l"(place), "r"(in_pairs), "r"(alone), "n"(kAt), "n"(kAt + 1), "n"(4 * kAt), "n"(4 * kAt + 4));
  }
}
// From and to an f32 state [K,V]; `key` and `value` are the tile's first channels. Pairs of neighbours at once where
// V is even and the state aligned.
template <bool store>
__device__ __forceinline__ void move_state(Accumulator& h, float* state, int K, int V, int key, int value, int thread) {
  const int lane = thread % 32, row = key + thread / 32 * 16 + lane / 4, column = value + 2 * (lane % 4);
  const bool in_pairs = V % 2 == 0 && reinterpret_cast<std::uintptr_t>(state) % 8 == 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float* at = state + static_cast<std::int64_t>(row + 8 * half) * V + column;
    const int left = row + 8 * half < K ? V - column : 0, of_pairs = in_pairs ? left : 0, alone = left - of_pairs;
    const auto move = [&]<int... j>(std::integer_sequence<int, j...>) {
      (move_two<store, 8 * j>(h[4 * j + 2 * half], h[4 * j + 2 * half + 1], at, of_pairs, alone), ...);
    };
    move(std::make_integer_sequence<int, 8>());
  }
}
__device__ __forceinline__ void read_state(Accumulator& h, const float* state, int K, int V, int key, int value,
                                           int thread) {
  clear(h);
  if (state != nullptr) move_state<false>(h, const_cast<float*>(state), K, V, key, value, thread);
}
__device__ __forceinline__ void write_state(float* state, Accumulator& h, int K, int V, int key, int value,
                                            int thread) {
  move_state<true>(h, state, K, V, key, value, thread);
}

// ---- where a chunk lies ----

struct Chunk {
  std::int64_t batch;  // row of the batch
  std::int64_t token;  // of its first token in the row
  int rows;            // tokens, 1..64
};

__device__ __forceinline__ Chunk chunk_of(const Span& span, std::int64_t index) {
  const std::int64_t left = span.length - index * kChunk;
  return {span.batch, span.begin + index * kChunk, static_cast<int>(left < kChunk ? left : kChunk)};
}
// Chunk number `chunk` of the call; without rows beyond the last.
__device__ __forceinline__ Chunk locate(const Sequences& s, std::int64_t chunk) {
  const std::int64_t n = sequence_of_chunk(s, chunk);
  if (n < 0) return {0, 0, 0};
  const Span span = span_of(s, n);
  return chunk_of(span, chunk - span.chunk_begin);
}

// Of a head, from the chunk's first token.
template <class T>
__device__ __forceinline__ T* row_of(const Strided& x, const Chunk& c, int head) {
  return static_cast<T*>(x.data) + anew(c.batch) * x.batch + c.token * x.token + anew(head) * x.head;
}

// Walks down the rows of a chunk, from `row` on.
template <class T>
struct RowWalk {
  T* place;
  int stride;
  __device__ __forceinline__ RowWalk(const Strided& x, const Chunk& c, int head, int channel, int row)
      : place(row_of<T>(x, c, head) + channel), stride(anew(static_cast<int>(x.token))) {
    place += row * stride;
  }
  __device__ __forceinline__ void step(int rows) { place += rows * stride; }
};

__device__ __forceinline__ void store_two(__nv_bfloat16* place, float2 x) {
  asm volatile("st.global.b32 [%0], %1;" ::"l"(place), "r"(ptx::pack_bf16(x.x, x.y)) : "memory");
}
__device__ __forceinline__ void store_two(float* place, float2 x) {
  asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(place), "f"(x.x), "f"(x.y) : "memory");
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
