// Sums over rows, such as the gradients of biases and norm weights, whose bits depend on the shape alone: fixed blocks
// of rows are summed apart in f32, then the blocks' sums in a fixed order. Two kernels; the first is the operator's
// own.
#pragma once

#include <algorithm>

#include "flashgla/base/cuda/sums.cuh"
#include "flashgla/ops/cuda/queue_kernel.cuh"

namespace flashgla::ops::cuda {

// In kernels: which rows a block sums, and where to.
struct PartialSums {
  std::int64_t rows, rows_per_block, columns;
  float* sums;  // [blocks, columns]

  __host__ __device__ std::int64_t blocks() const { return (rows + rows_per_block - 1) / rows_per_block; }
  __device__ std::int64_t begin(std::int64_t block) const { return block * rows_per_block; }
  __device__ std::int64_t end(std::int64_t block) const {
    const std::int64_t end = begin(block) + rows_per_block;
    return end < rows ? end : rows;
  }
};

// Sums in scratch, not yet written, which live as long as the caller's ArenaScope. At most `most_blocks` blocks, whose
// rows, but for the last one's, are a multiple of `together`.
inline PartialSums take_partial_sums(Context& context, std::int64_t rows, std::int64_t columns,
                                     std::int64_t most_blocks, std::int64_t together, const char* label) {
  std::int64_t each = std::max<std::int64_t>(1, (rows + most_blocks - 1) / most_blocks);
  each = (each + together - 1) / together * together;
  PartialSums partial{rows, each, columns, nullptr};
  partial.sums = context.scratch().tensor(Shape({partial.blocks(), columns}), DType::f32, label).as<float>();
  return partial;
}

constexpr int kReduceColumns = 32, kReduceDown = 8;  // small blocks: they find room beside the first kernel's last

static __global__ void __launch_bounds__(kReduceColumns* kReduceDown)
    reduce_partial_sums_kernel(PartialSums partial, float* out, bool accumulate) {
  flashgla::cuda::release_next();
  flashgla::cuda::wait_for_previous();
  __shared__ float shared[kReduceDown][kReduceColumns + 1];
  const int across = threadIdx.x % kReduceColumns, down = threadIdx.x / kReduceColumns;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kReduceColumns, column = first + across;
  float total = 0.0f;
  if (column < partial.columns) {
#pragma unroll 8
    for (std::int64_t block = down; block < partial.blocks(); block += kReduceDown) {
      total += partial.sums[block * partial.columns + column];
    }
  }
  shared[down][across] = total;
  __syncthreads();
  if (down != 0 || column >= partial.columns) return;
  total = accumulate ? out[column] : 0.0f;
#pragma unroll
  for (int i = 0; i < kReduceDown; ++i) total += shared[i][across];
  out[column] = total;
}

// out[column] (+)= sum over blocks.
inline void reduce(const Context& context, const PartialSums& partial, float* out, bool accumulate) {
  queue_kernel(context, "sums of blocks of rows", reduce_partial_sums_kernel,
               (partial.columns + kReduceColumns - 1) / kReduceColumns, kReduceColumns * kReduceDown, 0, partial, out,
               accumulate);
}

}  // namespace flashgla::ops::cuda
