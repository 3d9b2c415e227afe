// What the backwards in one kernel share: where a walk back in time is, and rows of gradients on their way out.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/backward/gates.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// Where the walk is in each tensor, in shared memory: registers are too few, and what the compiler would spill goes to
// the L2. [parity of the chunk under way][tensor] addresses, then [tensor] bytes from a chunk to the one before.
struct Places {
  enum Tensor { q, d_o, k, v, states, g, dq, dk, dv, dg, count };
  std::uint32_t shared;
  __device__ __forceinline__ std::uint32_t at(int index, int tensor) const {
    return shared + ((index & 1) * count + tensor) * 8;
  }
  static __device__ __forceinline__ std::uint64_t load(std::uint32_t address) {
    std::uint64_t x;
    asm volatile("ld.shared.u64 %0, [%1];" : "=l"(x) : "r"(address) : "memory");
    return x;
  }
  static __device__ __forceinline__ void store(std::uint32_t address, std::uint64_t x) {
    asm volatile("st.shared.u64 [%0], %1;" ::"r"(address), "l"(x) : "memory");
  }
  template <class T>
  __device__ __forceinline__ T* get(int index, Tensor tensor) const {
    return reinterpret_cast<T*>(load(at(index, tensor)));
  }
  __device__ __forceinline__ void start(int index, Tensor tensor, const void* place, std::int64_t step) const {
    store(at(index, tensor), reinterpret_cast<std::uint64_t>(place));
    store(at(0, 2 * count + tensor), static_cast<std::uint64_t>(step));
  }
  // Thread `tensor` of one warp: its place one chunk back.
  __device__ __forceinline__ void step_back(int index, int tensor) const {
    if (tensor < count) store(at(index - 1, tensor), load(at(index, tensor)) - load(at(0, 2 * count + tensor)));
  }
};

// Address of a sequence's chunk in a tensor of `element` bytes.
__device__ __forceinline__ char* chunk_place(const Strided& s, const Span& span, std::int64_t index, int head,
                                             int element) {
  return static_cast<char*>(s.data) +
         (span.batch * s.batch + (span.begin + index * kChunk) * s.token + head * s.head) * element;
}

// This warp's rows of a tile to a matrix.
__device__ __forceinline__ void store_tile_rows(std::uint32_t tile, __nv_bfloat16* matrix, int stride, int rows,
                                                int columns, int thread) {
  const int piece = thread & 7;
  const int first = (thread >> 5) * 16 + ((thread & 31) >> 3), inside = piece * 8 < columns ? rows - first : 0;
  __nv_bfloat16* to = matrix + first * stride + piece * 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (4 * i < inside) store_global_16(to, load_shared_16(tile + tile_piece(first + 4 * i, piece)));
    to += 4 * stride;
  }
  __syncwarp();
}
// Rows of an accumulator, rounded, to a matrix, through the warp's own rows of a tile.
template <class Core, bool kAgain = true>
__device__ __forceinline__ void store_through(std::uint32_t tile, __nv_bfloat16* matrix, int stride,
                                              const Accumulator& a, int rows, int columns) {
  const auto own = [] { return kAgain ? thread_shuffled<Core>(fresh_thread()) : fresh_thread(); };
  put_rounded<Core>(tile, a, own());
  __syncwarp();
  store_tile_rows(tile, matrix, stride, rows, columns, own());
}

// Whether this thread is of the block's first group, as the compiler sees it to be the same for the warp.
__device__ __forceinline__ bool in_first_group() {
  return __shfl_sync(0xffffffffu, threadIdx.x / kGroupThreads, 0) == 0;
}

// Sum over the columns of a tile times an accumulator, of this thread's two rows and columns.
__device__ __forceinline__ float2 dot_rows(std::uint32_t tile, const Accumulator& a, int thread) {
  std::uint32_t x[16];
  load_operand<Stored::k_inner>(x, tile, thread);
  return dot_rows(a, two_of_operand(x));
}

// Gates of one a token, by a warp: lane l has tokens 2 l and 2 l + 1 of a chunk. Sums from each of its tokens on, low
// and high, to the last one.
__device__ __forceinline__ float2 sum_from_here(float low, float high, int lane) {
  const float both = high + low, after = sum_to_come(both, lane);
  return make_float2(after, after - both + high);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
