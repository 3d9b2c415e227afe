// A warp has a row, and reads it again from the cache for each feature.
#include "flashgla/ops/cuda/each_element.cuh"
#include "flashgla/ops/feature_map/implementations.h"
#include "flashgla/ops/feature_map/row.h"

namespace flashgla::ops::feature_map {

namespace {

using flashgla::cuda::from_float;
using flashgla::cuda::to_float;
using ops::cuda::Operand;

constexpr int kThreads = 256, kLanes = 32;

struct Warp {
  __device__ __forceinline__ int rank() const { return static_cast<int>(threadIdx.x % kLanes); }
  __device__ __forceinline__ int count() const { return kLanes; }
  __device__ __forceinline__ float sum(float x) const {
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
  }
  __device__ __forceinline__ float largest(float x) const {
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
    }
    return x;
  }
};

__device__ __forceinline__ std::int64_t own_row() {
  return (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kLanes;
}
template <class T>
struct Reader {
  const T* from;
  __device__ __forceinline__ float operator()(int i) const { return to_float(from[i]); }
};
template <class T>
struct Writer {
  T* to;
  __device__ __forceinline__ void operator()(int i, float value) const { to[i] = from_float<T>(value); }
};

template <class T, Map kMap>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(Operand<T> x, Operand<T> y, std::int64_t rows, int channels, bool divide) {
  flashgla::cuda::wait_for_previous();
  const std::int64_t row = own_row();
  if (row >= rows) return;  // whole warps
  forward_row<kMap>(Warp(), channels, divide, Reader<T>{x.at(row, 0)}, Writer<T>{y.at(row, 0)});
}

template <class T, Map kMap>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(Operand<T> x, Operand<T> dy, Operand<T> dx, std::int64_t rows, int channels, bool divide) {
  flashgla::cuda::wait_for_previous();
  const std::int64_t row = own_row();
  if (row >= rows) return;
  backward_row<kMap>(Warp(), channels, divide, Reader<T>{x.at(row, 0)}, Reader<T>{dy.at(row, 0)},
                     Writer<T>{dx.at(row, 0)});
}

// Queues kernels.of<map>() for the rows of x.
template <class T, class Kernels, class... Operands>
void queue(Context& context, const Kernels& kernel_of, const TensorView& x, const Options& options,
           const Operands&... operands) {
  const std::int64_t rows = rows_of(x.shape);
  with_map(options.map, [&](auto map) {
    ops::cuda::queue_kernel(context, "feature_map", kernel_of(map), (rows * kLanes + kThreads - 1) / kThreads, kThreads,
                            0, Operand<T>(x), operands..., rows, static_cast<int>(x.size(-1)), options.divide);
  });
}

template <class T>
void forward_of(Context& context, const TensorView& x, const TensorView& y, const Options& options) {
  queue<T>(
      context, [](auto map) { return forward_kernel<T, decltype(map)::value>; }, x, options, Operand<T>(y));
}
template <class T>
void backward_of(Context& context, const TensorView& x, const TensorView& dy, const TensorView& dx,
                 const Options& options) {
  queue<T>(
      context, [](auto map) { return backward_kernel<T, decltype(map)::value>; }, x, options, Operand<T>(dy),
      Operand<T>(dx));
}

}  // namespace

const Implementation kCuda{
    "cuda", Device::Kind::cuda,
    [](const Problem& problem, const Architecture&) { return supports_f32_and_bf16({problem.dtype}); },
    [](Context& context, const TensorView& x, const TensorView& y, const Options& options) {
      (x.dtype == DType::f32 ? forward_of<float> : forward_of<__nv_bfloat16>)(context, x, y, options);
    },
    [](Context& context, const TensorView& x, const TensorView& dy, const TensorView& dx, const Options& options) {
      (x.dtype == DType::f32 ? backward_of<float> : backward_of<__nv_bfloat16>)(context, x, dy, dx, options);
    }};

}  // namespace flashgla::ops::feature_map
