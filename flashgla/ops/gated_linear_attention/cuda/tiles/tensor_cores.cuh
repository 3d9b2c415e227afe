// Products of 64x64 tiles by a group of 128 threads: on mma.sync, and on wgmma with what else Hopper has.
#pragma once

#include "flashgla/ops/cuda/warpgroup_products.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/tiles/layout.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// How an operand's tile is stored: a's as [m][k] or [k][m], b's as [n][k] or [k][n], first index the row.
enum class Stored { k_inner, k_outer };
// When mma.sync loads operands: as far ahead as there are registers, or half a product at a time, where the registers
// that loads far ahead take would spill others.
enum class Loads { ahead, in_turn };

// mma.sync: sm_80 and later.
struct TensorCore80 {
  static constexpr bool available = true;
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
      store_shared_4(tile + tile_piece(row + 8 * (i & 1), 2 * k16 + (i >> 1)) + 4 * (lane & 3), r[i]);
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
      store_shared_4(tile + tile_piece(row, 2 * warp + (i & 1)) + 4 * (lane & 3), x);
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
  // d += a times step k16 of a tile, 8 kColumns columns of it from 8 `first` on.
  template <Stored stored, int kColumns = 8>
  static __device__ __forceinline__ void add_step(float* d, const std::uint32_t (&a)[4], std::uint32_t tile, int k16,
                                                  int thread, int first = 0) {
#pragma unroll
    for (int j = 0; j < kColumns; j += 2) {
      std::uint32_t b[4];
      load_b<stored>(b, tile, k16, first + j, thread);
      multiply(d + 4 * j, a, b[0], b[1]);
      multiply(d + 4 * j + 4, a, b[2], b[3]);
    }
  }

  template <Stored a_stored, Stored b_stored, bool kFresh = false, Loads kLoads = Loads::ahead>
  static __device__ __forceinline__ void product(Accumulator& d, std::uint32_t a_tile, std::uint32_t b_tile,
                                                 int thread) {
    if constexpr (kFresh) clear(d);
#pragma unroll
    for (int k16 = 0; k16 < 4; ++k16) {
      if (kLoads == Loads::in_turn && k16 % 2 == 0) __syncwarp();
      std::uint32_t a[4];
      load_a<a_stored>(a, a_tile, k16, thread);
      add_step<b_stored>(d, a, b_tile, k16, thread);
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
      add_step<b_stored>(d, fragment, b_tile, k16, thread);
    }
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
namespace warpgroup = ops::cuda::warpgroup;
// wgmma reads both operands from shared memory, once a group instead of once a warp.
struct TensorCore90 {
  static constexpr bool available = true;
  template <class... Registers>
  static __device__ __forceinline__ void begin(Registers&... registers) {
    (warpgroup::pin(registers), ...);
    ptx::wgmma_fence();
  }
  template <class... Registers>
  static __device__ __forceinline__ void finish(Registers&... registers) {
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    (warpgroup::pin(registers), ...);
  }
  static __device__ __forceinline__ void publish() { ptx::fence_async_proxy(); }
  static __device__ __forceinline__ void commit() { ptx::wgmma_commit(); }
  template <int pending, class... Registers>
  static __device__ __forceinline__ void wait(Registers&... registers) {
    ptx::wgmma_wait<pending>();
    (warpgroup::pin(registers), ...);
  }
  // TMA, told by one thread, and mbarriers (8 bytes each) that count what it has brought or who has come.
  static constexpr auto init_barrier = ptx::mbarrier_init;
  static constexpr auto publish_barriers = ptx::fence_barrier_init;
  static constexpr auto arrive = ptx::mbarrier_arrive;
  static constexpr auto arrive_after_copies = ptx::mbarrier_arrive_after_copies;  // by copy_async
  static constexpr auto expect_bytes = ptx::mbarrier_arrive_expect;
  static constexpr auto wait_at = ptx::mbarrier_wait;  // with the parity of what is waited for
  static constexpr auto copy_in = ptx::copy_bulk;
  static constexpr auto copy_box = ptx::copy_box;  // of a tensor map: channel, token, head, batch
  // From shared memory, in groups; waiting is for the latest group to have been read.
  static constexpr auto copy_out = ptx::store_bulk;
  static constexpr auto copy_box_out = ptx::store_box;
  static constexpr auto commit_copies_out = ptx::store_bulk_commit;
  static constexpr auto wait_for_copies_out = ptx::store_bulk_wait_read;
  // Blocks of a cluster. There: where in the block of that rank lies what is at this address here.
  static constexpr auto there = ptx::cluster_address;
  static constexpr auto arrive_there = ptx::mbarrier_arrive_cluster;
  static constexpr auto expect_bytes_there = ptx::mbarrier_arrive_expect_cluster;
  static constexpr auto copy_there = ptx::copy_bulk_cluster;
  // All their threads, in two halves: who waits finds the barriers that were published before. Nothing else is ordered.
  static constexpr auto arrive_at_cluster = ptx::cluster_arrive;
  static constexpr auto wait_for_cluster = ptx::cluster_wait;
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

  // Of the part of a tile that k-step k16 reads.
  static constexpr warpgroup::Reads reads(Stored stored) {
    return stored == Stored::k_inner ? warpgroup::Reads::channels_inner : warpgroup::Reads::rows_inner;
  }
  template <Stored stored>
  static __device__ __forceinline__ std::uint64_t descriptor(std::uint32_t tile, int k16) {
    return warpgroup::descriptor<reads(stored)>(tile, k16);
  }
  // d += a b of a k-step, or d = a b.
  template <Stored a_stored, Stored b_stored, bool kMinus = false>
  static __device__ __forceinline__ void step(Accumulator& d, bool fresh, std::uint64_t a, std::uint64_t b) {
    if (fresh) {
      warpgroup::multiply<true, reads(b_stored), reads(a_stored), kMinus>(d, a, b);
    } else {
      warpgroup::multiply<false, reads(b_stored), reads(a_stored), kMinus>(d, a, b);
    }
  }
#define FLASHGLA_ACCUMULATOR(how, d)                                                                              \
  how(d[0]), how(d[1]), how(d[2]), how(d[3]), how(d[4]), how(d[5]), how(d[6]), how(d[7]), how(d[8]), how(d[9]),   \
      how(d[10]), how(d[11]), how(d[12]), how(d[13]), how(d[14]), how(d[15]), how(d[16]), how(d[17]), how(d[18]), \
      how(d[19]), how(d[20]), how(d[21]), how(d[22]), how(d[23]), how(d[24]), how(d[25]), how(d[26]), how(d[27]), \
      how(d[28]), how(d[29]), how(d[30]), how(d[31])
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
      step<a_stored, b_stored>(d, kFresh && k16 == kFirst, descriptor<a_stored>(a_tile, k16),
                               descriptor<b_stored>(b_tile, k16));
    }
  }
  // d += a b for each d with a b of its own: tiles that lie one after the other, stored [n][k], as a is [m][k]. One
  // wide product: a is read once.
  static __device__ __forceinline__ void products_side_by_side(std::uint32_t a_tile, std::uint32_t b_tiles, int,
                                                               Accumulator& d0, Accumulator& d1, Accumulator& d2) {
#pragma unroll
    for (int k16 = 0; k16 < 4; ++k16) {
      const std::uint64_t a = descriptor<Stored::k_inner>(a_tile, k16), b = descriptor<Stored::k_inner>(b_tiles, k16);
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
      const std::uint64_t b = descriptor<b_stored>(b_tile, k16);
      if (kFresh && k16 == kFirst) {
        warpgroup::multiply<true, reads(b_stored)>(d, a + 4 * k16, b);
      } else {
        warpgroup::multiply<false, reads(b_stored)>(d, a + 4 * k16, b);
      }
    }
  }
  // Columns 8 kFirst .. 8 kFirst + 15 of a b, from rows of b's tile, stored [n][k].
  template <int kFirst>
  static __device__ __forceinline__ void sixteen_columns(float (&c)[8], const std::uint32_t (&a)[16],
                                                         std::uint32_t b_tile) {
#pragma unroll
    for (int k16 = 0; k16 < 4; ++k16) {
      const std::uint64_t b = descriptor<Stored::k_inner>(b_tile + 1024 * kFirst, k16);
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
  // Columns 8 kFirst .. 8 kFirst + 7 likewise.
  template <int kFirst>
  static __device__ __forceinline__ void eight_columns(float (&c)[4], const std::uint32_t (&a)[16],
                                                       std::uint32_t b_tile) {
#pragma unroll
    for (int k16 = 0; k16 < 4; ++k16) {
      const std::uint64_t b = descriptor<Stored::k_inner>(b_tile + 1024 * kFirst, k16);
      if (k16 == 0) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, 0, 1, 1, 0;"
                     : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
      } else {
        asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, 1, 1, 1, 0;"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[4 * k16]), "r"(a[4 * k16 + 1]), "r"(a[4 * k16 + 2]), "r"(a[4 * k16 + 3]), "l"(b));
      }
    }
  }
  // d += half a k-step of a b: of a's columns 8 kHalf .. 8 kHalf + 7 alone. a: all of it or that k-step's.
  template <Stored b_stored, int kHalf, int count>
  static __device__ __forceinline__ void half_step(Accumulator& d, const std::uint32_t (&a)[count],
                                                   std::uint32_t b_tile) {
    constexpr int k16 = kHalf / 2, at = count == 4 ? 0 : 4 * k16;
    constexpr bool kFirst = kHalf % 2 == 0;
    const std::uint32_t half[4] = {kFirst ? a[at] : 0u, kFirst ? a[at + 1] : 0u, kFirst ? 0u : a[at + 2],
                                   kFirst ? 0u : a[at + 3]};
    warpgroup::multiply<false, reads(b_stored)>(d, half, descriptor<b_stored>(b_tile, k16));
  }
  // d += a b, or d -= a b, with a's part of k-step k16 where a_at(k16) says; b stored [k][n].
  template <bool kFresh, bool kMinus, class Place>
  static __device__ __forceinline__ void product_of(Accumulator& d, Place a_at, std::uint32_t b_tile) {
#pragma unroll
    for (int k16 = 0; k16 < 4; ++k16) {
      step<Stored::k_inner, Stored::k_outer, kMinus>(d, kFresh && k16 == 0, a_at(k16),
                                                     descriptor<Stored::k_outer>(b_tile, k16));
    }
  }
#undef FLASHGLA_ACCUMULATOR
};
#else
struct TensorCore90 {
  static constexpr bool available = false;  // kernels compile to nothing
};
#endif

}  // namespace flashgla::ops::gated_linear_attention::cuda
