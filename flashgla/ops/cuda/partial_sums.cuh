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

// The first kernel may announce its sums: the second then begins while the first still runs, and takes each sum as it
// comes, which is sooner than behind the end of the one and the wait of the other. Until it is written, an announced
// sum is this signalling NaN, which no arithmetic gives.
constexpr std::uint32_t kNotThere = 0x7f800001u;

// By one warp of each block, behind its wait: announces the `count` sums from `to` on, which the block will write,
// and lets the next kernel, reduce(), begin once all blocks have done so.
__device__ __forceinline__ void announce_sums(float* to, int count) {
  using flashgla::cuda::kWarp;
  for (int i = static_cast<int>(threadIdx.x) % kWarp; i < count; i += kWarp) to[i] = __uint_as_float(kNotThere);
  asm volatile("fence.acq_rel.gpu;" ::: "memory");  // __threadfence() is a stronger one, which takes longer
  __syncwarp();
  flashgla::cuda::release_next();
}

// kAnnounced: another kernel may be writing it.
template <bool kAnnounced>
__device__ __forceinline__ float load_sum(const float* from) {
  if constexpr (!kAnnounced) return *from;
  float x;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(x) : "l"(from) : "memory");
  return x;
}

constexpr int kReduceThreads = 256;  // of a block, which has so many columns' sums to add up:
constexpr int kReduceColumns = 8;    // a sector of memory; more where partial sums are few and columns many
constexpr int kReduceBatch = 8;      // blocks' sums that a thread asks for before it adds the first

// Out: out(column) is where a column's sum goes. kColumns: of a block, at most a warp. kAnnounced: all blocks of the
// kernel ahead are behind their wait when this one begins, so that what came before them has ended.
template <int kColumns, bool kAnnounced, class Out>
static __global__ void __launch_bounds__(kReduceThreads, kAnnounced ? 8 : 1)
    reduce_partial_sums_kernel(PartialSums partial, Out out, bool accumulate) {
  using flashgla::cuda::kWarp;
  constexpr int kDown = kReduceThreads / kColumns;
  flashgla::cuda::release_next();
  __shared__ float shared[kReduceThreads / kWarp][kColumns];
  const int across = threadIdx.x % kColumns, down = threadIdx.x / kColumns;
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * kColumns + across;
  const bool there = column < partial.columns, writes = there && down == 0;
  const auto blocks = static_cast<int>(partial.blocks());
  const float* from = partial.sums + down * partial.columns + column;
  const std::int64_t apart = kDown * partial.columns;
  if (!kAnnounced || blocks == 0) flashgla::cuda::wait_for_previous();
  float result = writes && accumulate ? load_sum<kAnnounced>(out(column)) : 0.0f, total = 0.0f;
  for (int first = down; there && first < blocks; first += kDown * kReduceBatch) {
    float read[kReduceBatch];
    for (bool complete = false; !complete;) {
      complete = true;
#pragma unroll
      for (int k = 0; k < kReduceBatch; ++k) {
        read[k] = first + k * kDown < blocks ? load_sum<kAnnounced>(from + k * apart) : 0.0f;
        complete = complete && (!kAnnounced || __float_as_uint(read[k]) != kNotThere);
      }
      if (!complete) __nanosleep(50);
    }
    from += kReduceBatch * apart;
#pragma unroll
    for (int k = 0; k < kReduceBatch; ++k) total += read[k];
  }
#pragma unroll
  for (int distance = kColumns; distance < kWarp; distance *= 2) {
    total += __shfl_xor_sync(0xffffffffu, total, distance);
  }
  if (threadIdx.x % kWarp < kColumns) shared[threadIdx.x / kWarp][across] = total;
  __syncthreads();
  if (kAnnounced) flashgla::cuda::wait_for_previous();
  if (!writes) return;
#pragma unroll
  for (int i = 0; i < kReduceThreads / kWarp; ++i) result += shared[i][across];
  *out(column) = result;
}

// Neighbouring places.
struct SumsOut {
  float* out;
  __device__ __forceinline__ float* operator()(std::int64_t column) const { return out + column; }
};

// *out(column) (+)= sum over blocks. kAnnounced: the kernel ahead is the one that writes these sums, and announces
// them.
template <int kColumns = kReduceColumns, bool kAnnounced = false, class Out>
void reduce(const Context& context, const PartialSums& partial, const Out& out, bool accumulate) {
  queue_kernel(context, "sums of blocks of rows", reduce_partial_sums_kernel<kColumns, kAnnounced, Out>,
               (partial.columns + kColumns - 1) / kColumns, kReduceThreads, 0, partial, out, accumulate);
}

template <int kColumns = kReduceColumns, bool kAnnounced = false>
void reduce(const Context& context, const PartialSums& partial, float* out, bool accumulate) {
  reduce<kColumns, kAnnounced>(context, partial, SumsOut{out}, accumulate);
}

}  // namespace flashgla::ops::cuda
