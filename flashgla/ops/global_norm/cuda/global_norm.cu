// Two kernels: sums of fixed blocks, then their sum.
#include <cmath>

#include "flashgla/base/cuda/sums.cuh"
#include "flashgla/base/cuda/vectors.cuh"
#include "flashgla/ops/cuda/each_element.cuh"
#include "flashgla/ops/global_norm/implementations.h"

namespace flashgla::ops::global_norm {

namespace {

using ops::cuda::Vector;

constexpr int kThreads = 256, kRounds = 4;
constexpr std::int64_t kMostBlocks = 1056;
constexpr int kFinalThreads = 1024;

// Block b sums `each` elements from b * each on.
template <int N, class T>
__global__ void __launch_bounds__(kThreads)
    squares_kernel(const T* x, std::int64_t count, std::int64_t each, double* sums) {
  flashgla::cuda::wait_for_previous();
  __shared__ double shared[flashgla::cuda::kWarp];
  const std::int64_t begin = blockIdx.x * each, end = begin + each < count ? begin + each : count;
  double totals[kRounds] = {};
  std::int64_t at = begin + threadIdx.x * N;
  for (; at + (kRounds - 1) * kThreads * N + N <= end; at += kRounds * kThreads * N) {
    Vector<T, N> values[kRounds];
#pragma unroll
    for (int round = 0; round < kRounds; ++round) values[round] = Vector<T, N>::load(x + at + round * kThreads * N);
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const double value = values[round][i];
        totals[round] = fma(value, value, totals[round]);
      }
    }
  }
  for (; at < end; at += kThreads * N) {
    for (int i = 0; i < N && at + i < end; ++i) {
      const double value = flashgla::cuda::to_float(x[at + i]);
      totals[0] = fma(value, value, totals[0]);
    }
  }
  const double total = flashgla::cuda::block_sum((totals[0] + totals[1]) + (totals[2] + totals[3]), shared);
  if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

__global__ void __launch_bounds__(kFinalThreads) final_kernel(const double* sums, std::int64_t count, double* out) {
  flashgla::cuda::wait_for_previous();
  __shared__ double shared[flashgla::cuda::kWarp];
  double total = 0.0;
  for (std::int64_t i = threadIdx.x; i < count; i += kFinalThreads) total += sums[i];
  total = flashgla::cuda::block_sum(total, shared);
  if (threadIdx.x == 0) *out = total;
}

template <int N, class T>
void queue_squares(Context& context, const TensorView& x, std::int64_t blocks, std::int64_t each, double* sums) {
  ops::cuda::queue_kernel(context, "global_norm", squares_kernel<N, T>, blocks, kThreads, 0,
                          static_cast<const T*>(x.data), x.numel(), each, sums);
}

void sum_on_device(Context& context, const TensorView& x, const TensorView& sum) {
  constexpr std::int64_t kTogether = 4096;  // elements of a block are a multiple of it
  const std::int64_t count = x.numel();
  const std::int64_t each = ((count + kMostBlocks - 1) / kMostBlocks + kTogether - 1) / kTogether * kTogether;
  const std::int64_t blocks = count == 0 ? 0 : (count + each - 1) / each;
  const ArenaScope scope(context.scratch());
  const TensorView partial = context.scratch().tensor(Shape({blocks}), DType::f64, "global_norm: sums of blocks");
  if (context.planning()) return;
  auto* sums = partial.as<double>();
  const bool aligned = reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0;
  if (x.dtype == DType::f32) {
    (aligned ? queue_squares<4, float> : queue_squares<1, float>)(context, x, blocks, each, sums);
  } else {
    (aligned ? queue_squares<8, __nv_bfloat16> : queue_squares<1, __nv_bfloat16>)(context, x, blocks, each, sums);
  }
  ops::cuda::queue_kernel(context, "global_norm", final_kernel, 1, kFinalThreads, 0, static_cast<const double*>(sums),
                          blocks, sum.as<double>());
}

bool find_on_device(Context& context, const TensorView& x) {
  const ArenaScope scope(context.scratch());
  const TensorView sum = context.scratch().tensor(Shape({1}), DType::f64, "global_norm: sum");
  sum_on_device(context, x, sum);
  if (context.planning()) return false;
  double total = 0.0;
  context.queue().copy(&total, sum.data, sizeof(total));
  context.queue().synchronize();
  return !std::isfinite(total);
}

}  // namespace

const Implementation kCuda{
    "cuda", Device::Kind::cuda,
    [](const Problem& problem, const Architecture&) { return supports_f32_and_bf16({problem.dtype}); }, sum_on_device,
    find_on_device};

}  // namespace flashgla::ops::global_norm
