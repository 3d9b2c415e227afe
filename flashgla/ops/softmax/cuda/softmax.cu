// A warp has a row, and reads it again from the cache where it is longer than the warp.
#include "flashgla/ops/cuda/each_element.cuh"
#include "flashgla/ops/softmax/implementations.h"

namespace flashgla::ops::softmax {

namespace {

using flashgla::cuda::from_float;
using flashgla::cuda::to_float;
using ops::cuda::Operand;

constexpr int kThreads = 256, kLanes = 32;

__device__ __forceinline__ float largest_of_warp(float x) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
  return x;
}
__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

__device__ __forceinline__ std::int64_t own_row() {
  return (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kLanes;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(Operand<T> x, Operand<T> y, std::int64_t rows, std::int64_t length) {
  flashgla::cuda::wait_for_previous();
  const std::int64_t row = own_row();
  if (row >= rows) return;  // whole warps
  const int lane = threadIdx.x % kLanes;
  const T* from = x.at(row, 0);
  T* to = y.at(row, 0);
  float largest = -INFINITY, total = 0.0f;
  for (std::int64_t d = lane; d < length; d += kLanes) largest = fmaxf(largest, to_float(from[d]));
  largest = largest_of_warp(largest);
  for (std::int64_t d = lane; d < length; d += kLanes) total += expf(to_float(from[d]) - largest);
  const float scale = 1.0f / sum_of_warp(total);
  for (std::int64_t d = lane; d < length; d += kLanes) to[d] = from_float<T>(expf(to_float(from[d]) - largest) * scale);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(Operand<T> y, Operand<T> dy, Operand<T> dx, std::int64_t rows, std::int64_t length) {
  flashgla::cuda::wait_for_previous();
  const std::int64_t row = own_row();
  if (row >= rows) return;
  const int lane = threadIdx.x % kLanes;
  const T *values = y.at(row, 0), *gradients = dy.at(row, 0);
  T* to = dx.at(row, 0);
  float dot = 0.0f;
  for (std::int64_t d = lane; d < length; d += kLanes) dot += to_float(values[d]) * to_float(gradients[d]);
  dot = sum_of_warp(dot);
  for (std::int64_t d = lane; d < length; d += kLanes) {
    to[d] = from_float<T>(to_float(values[d]) * (to_float(gradients[d]) - dot));
  }
}

std::int64_t blocks_of(std::int64_t rows) { return (rows * kLanes + kThreads - 1) / kThreads; }

template <class T>
void forward_of(Context& context, const TensorView& x, const TensorView& y) {
  const std::int64_t rows = rows_of(x.shape);
  ops::cuda::queue_kernel(context, "softmax", forward_kernel<T>, blocks_of(rows), kThreads, 0, Operand<T>(x),
                          Operand<T>(y), rows, x.size(-1));
}
template <class T>
void backward_of(Context& context, const TensorView& y, const TensorView& dy, const TensorView& dx) {
  const std::int64_t rows = rows_of(y.shape);
  ops::cuda::queue_kernel(context, "softmax", backward_kernel<T>, blocks_of(rows), kThreads, 0, Operand<T>(y),
                          Operand<T>(dy), Operand<T>(dx), rows, y.size(-1));
}

}  // namespace

const Implementation kCuda{
    "cuda", Device::Kind::cuda,
    [](const Problem& problem, const Architecture&) { return supports_f32_and_bf16({problem.dtype}); },
    [](Context& context, const TensorView& x, const TensorView& y) {
      (x.dtype == DType::f32 ? forward_of<float> : forward_of<__nv_bfloat16>)(context, x, y);
    },
    [](Context& context, const TensorView& y, const TensorView& dy, const TensorView& dx) {
      (y.dtype == DType::f32 ? backward_of<float> : backward_of<__nv_bfloat16>)(context, y, dy, dx);
    }};

}  // namespace flashgla::ops::softmax
