// Forward kernels of norms: a block of threads holds a row, or a few next to each other, in registers; where a row is
// short, each of its warps does. Threads are as many as a row needs and known to be all of the block's, so that there
// is nothing to divide by, one barrier, and room for as many blocks as registers allow.
#pragma once

#include "flashgla/base/cuda/sums.cuh"
#include "flashgla/ops/cuda/each_element.cuh"

namespace flashgla::ops::cuda {

// How rows of `length` are shared out: thread i of a row has its vectors i, i + across, ..
struct BlockRows {
  static constexpr int kThreads = 256;  // at most
  static constexpr int kMost = 4;       // vectors of a row that a thread holds
  std::int64_t rows;
  float each;                // 1 / length
  int vectors = 0;           // of a row; 0: rows are not held
  int across = 0, down = 1;  // threads of a row, a multiple of a warp; so many times in a block, if they are a warp

  // Rows that are `whole` vectors of `elements`, all of them aligned. Two vectors a thread, where they are neither too
  // few nor too many.
  BlockRows(std::int64_t row_count, std::int64_t length, int elements, bool whole)
      : rows(row_count), each(1.0f / static_cast<float>(length)) {
    using flashgla::cuda::kWarp;
    if (!whole || length > std::int64_t{kThreads} * kMost * elements) return;
    vectors = static_cast<int>(length) / elements;
    across = std::clamp((vectors / 2 + kWarp - 1) / kWarp * kWarp, kWarp, kThreads);
    if (across == kWarp) down = kThreads / kWarp;
  }
  int held() const { return vectors == 0 ? 0 : (vectors + across - 1) / across; }
  int threads() const { return across * down; }
  __device__ __forceinline__ int rank() const {
    return static_cast<int>(down == 1 ? threadIdx.x : threadIdx.x % flashgla::cuda::kWarp);
  }
  __device__ __forceinline__ int index() const {  // of the row in the block
    return static_cast<int>(down == 1 ? 0 : threadIdx.x / flashgla::cuda::kWarp);
  }
  std::int64_t blocks(int rows_at_once) const {
    return (rows + std::int64_t{down} * rows_at_once - 1) / (std::int64_t{down} * rows_at_once);
  }
};

// Calls run(integral_constant, W()) with how many vectors a thread has room for, 1, 2 or 4, and the weight's type.
template <class Run>
void with_room(const BlockRows& grid, bool wide_weight, const Run& run) {
  const auto with_type = [&](auto held) { wide_weight ? run(held, float()) : run(held, __nv_bfloat16()); };
  if (grid.held() == 1) return with_type(std::integral_constant<int, 1>());
  if (grid.held() == 2) return with_type(std::integral_constant<int, 2>());
  with_type(std::integral_constant<int, BlockRows::kMost>());
}

// In kernels: calls body(i, column) for the vectors of N that a thread holds of a row, and are there.
template <int kHeld, int N, class Body>
__device__ __forceinline__ void for_each_held(const BlockRows& grid, const Body& body) {
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int vector = i * grid.across + grid.rank();
    if (vector < grid.vectors) body(i, vector * N);
  }
}

// Sums over the threads of kRows rows, each time in shared memory of its own.
template <int kRows>
struct SumsOfBlock {
  static constexpr int kWarps = BlockRows::kThreads / flashgla::cuda::kWarp;
  float of_warps[kRows][kWarps];

  __device__ __forceinline__ void add_up(const BlockRows& grid, float (&x)[kRows]) {
    using flashgla::cuda::kWarp;
#pragma unroll
    for (int k = 0; k < kRows; ++k) x[k] = flashgla::cuda::warp_sum(x[k]);
    const int warps = grid.across / kWarp;
    if (warps == 1) return;
    if (threadIdx.x % kWarp == 0) {
#pragma unroll
      for (int k = 0; k < kRows; ++k) of_warps[k][threadIdx.x / kWarp] = x[k];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      x[k] = of_warps[k][0];
#pragma unroll
      for (int i = 1; i < kWarps; ++i) x[k] += i < warps ? of_warps[k][i] : 0.0f;
    }
  }
};

// kRows rows next to each other, of which a thread holds kHeld vectors each: zeros where they are not there.
template <int kRows, int kHeld, int N, class T>
struct RowsOfBlock {
  Vector<T, N> x[kRows][kHeld];
  std::int64_t first;  // row
  int count;           // of rows; none where it is 0 or less

  __device__ __forceinline__ RowsOfBlock(const Operand<T>& from, const BlockRows& grid)
      : first((std::int64_t{blockIdx.x} * grid.down + grid.index()) * kRows),
        count(static_cast<int>(grid.rows - first < kRows ? grid.rows - first : kRows)) {
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) x[k][i] = Vector<T, N>::zero();
      if (k >= count) continue;
      const T* row = from.at(first + k, 0);
      for_each_held<kHeld, N>(grid, [&](int i, int column) { x[k][i] = Vector<T, N>::load(row + column); });
    }
  }

  // What body(row, x[row][i][j]) gives, added up over a row's elements that are there: a chain for each vector, since
  // additions that wait for each other take longer.
  template <class Body>
  __device__ __forceinline__ void sum(const BlockRows& grid, const Body& body, float (&totals)[kRows]) const {
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      float of_vector[kHeld] = {};
      for_each_held<kHeld, N>(grid, [&](int i, int) {
#pragma unroll
        for (int j = 0; j < N; ++j) of_vector[i] = body(k, x[k][i][j], of_vector[i]);
      });
      totals[k] = of_vector[0];
#pragma unroll
      for (int i = 1; i < kHeld; ++i) totals[k] += of_vector[i];
    }
  }
};

}  // namespace flashgla::ops::cuda
