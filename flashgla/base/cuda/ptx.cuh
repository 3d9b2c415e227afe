// Thin wrappers around PTX instructions: one function an instruction, no policy. Those that need sm_90a say so.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flashgla::ptx {

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// 2^x; -inf gives 0, subnormal results flush to 0.
__device__ __forceinline__ float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x to one ulp or two; subnormal numbers are zeros.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The larger of two; NaN where either is.
__device__ __forceinline__ float larger_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

// Byte i of the result: byte s of b:a for the half byte i of `selectors`, s; of its sign alone where s is 8 more.
__device__ __forceinline__ std::uint32_t select_bytes(std::uint32_t a, std::uint32_t b, std::uint32_t selectors) {
  std::uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(selectors));
  return bytes;
}

// Two floats to one register of two narrow ones; `low` is the element of lower address.
__device__ __forceinline__ std::uint32_t pack_bf16(float low, float high) {
  std::uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
__device__ __forceinline__ std::uint32_t pack_f16(float low, float high) {
  std::uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
__device__ __forceinline__ float2 unpack_bf16(std::uint32_t packed) {
  return make_float2(__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u));
}
__device__ __forceinline__ float2 unpack_f16(std::uint32_t packed) {
  return __half22float2(*reinterpret_cast<const __half2*>(&packed));
}
// a b + c on pairs of bf16, rounded once.
__device__ __forceinline__ std::uint32_t fma_bf16(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
// ---- asynchronous copies, global to shared ----

// 16 bytes; the last 16 - source_bytes of them are written as zeros and not read (source_bytes 0 or 16 here).
__device__ __forceinline__ void copy_async_16(std::uint32_t shared, const void* global, int source_bytes = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(source_bytes)
               : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `pending` of this thread's latest groups are under way.
template <int pending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// The 128 bytes around an address to the L2.
__device__ __forceinline__ void prefetch_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

// ---- matrix fragments ----

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l%8 of matrix l/8.
__device__ __forceinline__ void load_matrix_4(std::uint32_t (&r)[4], std::uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}
__device__ __forceinline__ void load_matrix_4_transposed(std::uint32_t (&r)[4], std::uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

// An 8x8 matrix of 16-bit elements across a warp, transposed: lane l holds of row l/4 columns 2(l%4) and the next.
__device__ __forceinline__ std::uint32_t transpose_matrix(std::uint32_t x) {
  std::uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// d += a b, a 16x16 (row), b 16x8 (column), d 16x8. Lane l holds of d rows l/4 and l/4+8, columns 2(l%4) and +1:
// d[0], d[1] of the first row, d[2], d[3] of the second.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                         std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The same for signed bytes and sums of 32 bits: a 16x32, b 32x8. Of a and b a lane has four neighbours along K where
// it has two of bf16, 4 (l%4) on.
__device__ __forceinline__ void mma_s8(int (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Barrier `id` (1..15; 0 is __syncthreads) among `threads` threads.
__device__ __forceinline__ void barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// The same, and whether the predicate holds for any of them.
__device__ __forceinline__ bool barrier_or(int id, int threads, bool predicate) {
  int any;
  asm volatile(
      "{\n.reg .pred mine, all;\nsetp.ne.s32 mine, %1, 0;\nbarrier.cta.red.or.pred all, %2, %3, mine;\n"
      "selp.s32 %0, 1, 0, all;\n}"
      : "=r"(any)
      : "r"(static_cast<int>(predicate)), "r"(id), "r"(threads)
      : "memory");
  return any != 0;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)  // sm_90a only

__device__ __forceinline__ void store_matrix_4(std::uint32_t shared, std::uint32_t r0, std::uint32_t r1,
                                               std::uint32_t r2, std::uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared), "r"(r0), "r"(r1), "r"(r2),
               "r"(r3)
               : "memory");
}

__device__ __forceinline__ void store_matrix_4_transposed(std::uint32_t shared, std::uint32_t r0, std::uint32_t r1,
                                                          std::uint32_t r2, std::uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3)
               : "memory");
}

// ---- mbarriers (8 bytes of shared memory each) ----
__device__ __forceinline__ void mbarrier_init(std::uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// After initialising, before other threads or TMA use the barriers; then __syncthreads.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("{.reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;}" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(std::uint32_t barrier) {
  asm volatile("{.reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0];}" ::"r"(barrier) : "memory");
}
// Arrives once this thread's copy_async so far have been done.
__device__ __forceinline__ void mbarrier_arrive_after_copies(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra finished;\nbra again;\nfinished:\n}" ::"r"(
          barrier),
      "r"(parity)
      : "memory");
}
// Contiguous bytes (16-byte aligned, a multiple of 16) by TMA; counted down on the mbarrier.
__device__ __forceinline__ void copy_bulk(std::uint32_t shared, const void* global, std::uint32_t bytes,
                                          std::uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}
// A box of a tensor of four dimensions, as its tensor map (in global, constant or parameter memory) says, zeros outside
// the tensor; counted down on the mbarrier.
__device__ __forceinline__ void copy_box(std::uint32_t shared, const void* map, int x0, int x1, int x2, int x3,
                                         std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2,%3,%4,%5}], "
      "[%6];" ::"r"(shared),
      "l"(map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(barrier)
      : "memory");
}

// ---- clusters of blocks: shared memory of another block, at addresses that only these know ----

// Where in block `rank` of the cluster lies what is at this address here.
__device__ __forceinline__ std::uint32_t cluster_address(std::uint32_t shared, std::uint32_t rank) {
  std::uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared), "r"(rank));
  return there;
}
// After reads that are done; with .release.cluster, for writes, it would come with a barrier for all of the GPU's
// memory.
__device__ __forceinline__ void mbarrier_arrive_cluster(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect_cluster(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Contiguous bytes (16-byte aligned, a multiple of 16) from this block's shared memory to another's by TMA;
// counted down on an mbarrier there.
__device__ __forceinline__ void copy_bulk_cluster(std::uint32_t there, std::uint32_t shared, std::uint32_t bytes,
                                                  std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(there),
      "r"(shared), "r"(bytes), "r"(barrier)
      : "memory");
}
// A barrier of all threads of all blocks of the cluster, in two halves. Arriving publishes nothing by itself.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// ---- asynchronous copies, shared to global ----

// Contiguous bytes (16-byte aligned, a multiple of 16) from shared memory to global by TMA; the thread's
// stores since the last commit are a group, and wait_read returns when all its groups have been read.
__device__ __forceinline__ void store_bulk(void* global, std::uint32_t shared, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
               : "memory");
}
// Likewise to a tensor map's box; what lies outside the tensor is not written.
__device__ __forceinline__ void store_box(const void* map, int x0, int x1, int x2, int x3, std::uint32_t shared) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1,%2,%3,%4}], [%5];" ::"l"(map),
               "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(shared)
               : "memory");
}
__device__ __forceinline__ void store_bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void store_bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// Makes this thread's ordinary shared-memory writes visible to wgmma and TMA; before the barrier.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- warpgroup matrix products ----
// Registers of each thread of a warpgroup from here on, a multiple of 8: fewer, for others, or more, once they are
// free.
template <int registers>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

#endif

}  // namespace flashgla::ptx
