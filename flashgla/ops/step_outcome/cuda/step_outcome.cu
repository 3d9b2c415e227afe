#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/step_outcome/implementations.h"

namespace flashgla::ops::step_outcome {

namespace {

using flashgla::cuda::Begin;
using flashgla::cuda::launch;

constexpr int kThreads = kLanes;

cudaStream_t stream_of(const Context& context) { return static_cast<cudaStream_t>(context.stream()); }

template <class T>
__global__ void __launch_bounds__(kThreads) sum_kernel(const T* x, std::int64_t count, double* total, bool accumulate) {
  __shared__ double lanes[kThreads];
  double lane = 0.0;
#pragma unroll 4
  for (std::int64_t i = threadIdx.x; i < count; i += kThreads) lane += static_cast<double>(x[i]);
  lanes[threadIdx.x] = lane;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) lanes[threadIdx.x] += lanes[threadIdx.x + half];
  }
  if (threadIdx.x == 0) *total = (accumulate ? *total : 0.0) + lanes[0];
}

__global__ void clear_kernel(const double* made, unsigned char* bytes, std::int64_t count) {
  if (*made != 0.0) return;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; i < count; i += step) {
    bytes[i] = 0;
  }
}

// Positions as unsigned, so that -1, "none", is the largest.
__global__ void forget_kernel(unsigned long long* first) { *first = ~0ull; }

template <class T>
__global__ void find_kernel(const double* made, const T* x, std::int64_t count, unsigned long long* first) {
  if (*made != 0.0) return;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; i < count; i += step) {
    if (x[i] - x[i] != T(0)) {
      atomicMin(first, static_cast<unsigned long long>(i));  // of positions: the order does not matter
      return;
    }
  }
}

void sum_on_device(Context& context, const TensorView& x, const TensorView& total, bool accumulate) {
  dispatch_floating(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) {
      launch("sum", sum_kernel<T>, dim3(1), kThreads, 0, stream_of(context), Begin::after_previous, x.as<T>(),
             x.numel(), total.as<double>(), accumulate);
    }
  });
}

dim3 blocks_of(const Context& context) {
  return dim3(static_cast<unsigned>(4 * context.architecture().multiprocessors));
}

void clear_on_device(Context& context, const TensorView& made, const TensorView& view) {
  launch("clear_unless", clear_kernel, blocks_of(context), 256, 0, stream_of(context), Begin::after_previous,
         made.as<double>(), static_cast<unsigned char*>(view.data), static_cast<std::int64_t>(view.bytes()));
}

void find_on_device(Context& context, const TensorView& made, const TensorView& x, const TensorView& first) {
  auto* position = reinterpret_cast<unsigned long long*>(first.as<std::int64_t>());
  launch("find_unless", forget_kernel, dim3(1), 1, 0, stream_of(context), Begin::after_previous, position);
  dispatch_floating(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) {
      launch("find_unless", find_kernel<T>, blocks_of(context), 256, 0, stream_of(context), Begin::after_previous,
             made.as<double>(), x.as<T>(), x.numel(), position);
    }
  });
}

}  // namespace

const Implementation kCuda{
    "cuda",        Device::Kind::cuda, [](const Problem&, const Architecture&) { return Support::yes(); },
    sum_on_device, clear_on_device,    find_on_device};

}  // namespace flashgla::ops::step_outcome
