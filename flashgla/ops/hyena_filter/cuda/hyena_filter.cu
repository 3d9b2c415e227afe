// A thread an element: a filter is made once for all sequences of a call.
#include "flashgla/base/cuda/vectors.cuh"
#include "flashgla/ops/cuda/queue_kernel.cuh"
#include "flashgla/ops/elementwise/elementwise.h"
#include "flashgla/ops/hyena_filter/decay.h"
#include "flashgla/ops/hyena_filter/implementations.h"
#include "flashgla/ops/weight_in_f32.h"

namespace flashgla::ops::hyena_filter {

namespace {

using bf16 = __nv_bfloat16;
using flashgla::cuda::from_float;
using flashgla::cuda::to_float;

constexpr int kThreads = 256;

// A tensor [rows,D], its last dimension contiguous.
template <class T>
struct Matrix {
  T* data;
  std::int64_t stride;
  explicit Matrix(const TensorView& view) : data(static_cast<T*>(view.data)), stride(view.stride[0]) {}
  __device__ __forceinline__ T& at(std::int64_t row, std::int64_t d) const { return data[row * stride + d]; }
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    sine_kernel(Matrix<T> x, const float* frequency, Matrix<T> y, std::int64_t rows, std::int64_t channels) {
  flashgla::cuda::wait_for_previous();
  const std::int64_t item = std::int64_t{blockIdx.x} * kThreads + threadIdx.x, row = item / channels;
  const std::int64_t d = item - row * channels;
  if (row < rows) y.at(row, d) = from_float<T>(sinf(frequency[d] * to_float(x.at(row, d))));
}

// terms [rows,D]: what the frequencies' gradients are sums of.
template <class T>
__global__ void __launch_bounds__(kThreads)
    sine_backward_kernel(Matrix<T> x, const float* frequency, Matrix<T> dy, Matrix<T> dx, float* terms,
                         std::int64_t rows, std::int64_t channels) {
  flashgla::cuda::wait_for_previous();
  const std::int64_t item = std::int64_t{blockIdx.x} * kThreads + threadIdx.x, row = item / channels;
  const std::int64_t d = item - row * channels;
  if (row >= rows) return;
  const float value = to_float(x.at(row, d)), slope = to_float(dy.at(row, d)) * cosf(frequency[d] * value);
  terms[item] = slope * value;
  dx.at(row, d) = from_float<T>(slope * frequency[d]);
}

template <class From, class To>
__global__ void __launch_bounds__(kThreads) window_kernel(Matrix<From> x, Matrix<To> y, float first, float step,
                                                          float shift, std::int64_t rows, std::int64_t channels) {
  flashgla::cuda::wait_for_previous();
  const std::int64_t item = std::int64_t{blockIdx.x} * kThreads + threadIdx.x, row = item / channels;
  const std::int64_t d = item - row * channels;
  if (row >= rows) return;
  const float decay = expf(-static_cast<float>(row) * fmaf(step, static_cast<float>(d), first)) + shift;
  y.at(row, d) = from_float<To>(to_float(x.at(row, d)) * decay);
}

std::int64_t blocks_of(const TensorView& x) { return (x.numel() + kThreads - 1) / kThreads; }

template <class Run>
void with_type(const TensorView& x, const Run& run) {
  x.dtype == DType::f32 ? run(float{}) : run(bf16{});
}

void cuda_sine_forward(Context& context, const TensorView& x, const TensorView& frequency, const TensorView& y) {
  const ArenaScope scope(context.scratch());
  const float* wide = weight_in_f32(context, frequency, frequency.size(0));
  if (context.planning()) return;
  with_type(x, [&](auto zero) {
    using T = decltype(zero);
    ops::cuda::queue_kernel(context, "hyena_filter", sine_kernel<T>, blocks_of(x), kThreads, 0, Matrix<T>(x), wide,
                            Matrix<T>(y), x.size(0), x.size(1));
  });
}

void cuda_sine_backward(Context& context, const TensorView& x, const TensorView& frequency, const TensorView& dy,
                        const TensorView& dx, const TensorView& dfrequency) {
  const ArenaScope scope(context.scratch());
  const float* wide = weight_in_f32(context, frequency, frequency.size(0));
  const TensorView terms = context.scratch().tensor(x.shape, DType::f32, "hyena_filter: sums");
  if (!context.planning()) {
    with_type(x, [&](auto zero) {
      using T = decltype(zero);
      ops::cuda::queue_kernel(context, "hyena_filter", sine_backward_kernel<T>, blocks_of(x), kThreads, 0, Matrix<T>(x),
                              wide, Matrix<T>(dy), Matrix<T>(dx), static_cast<float*>(terms.data), x.size(0),
                              x.size(1));
    });
  }
  elementwise::column_sum(context, terms, dfrequency, true);
}

void cuda_window(Context& context, const TensorView& x, const Window& window, const TensorView& y) {
  if (context.planning()) return;
  const Decays decays(x.size(1));
  const double row = 1.0 / static_cast<double>(window.length - 1);
  with_type(x, [&](auto from) {
    with_type(y, [&](auto to) {
      using From = decltype(from);
      using To = decltype(to);
      ops::cuda::queue_kernel(context, "hyena_filter", window_kernel<From, To>, blocks_of(x), kThreads, 0,
                              Matrix<From>(x), Matrix<To>(y), static_cast<float>(decays.first * row),
                              static_cast<float>(decays.step * row), static_cast<float>(window.shift), x.size(0),
                              x.size(1));
    });
  });
}

}  // namespace

const Implementation kCuda{"cuda",
                           Device::Kind::cuda,
                           [](const Problem& problem, const Architecture&) {
                             return supports_f32_and_bf16({problem.dtype, problem.out});
                           },
                           cuda_sine_forward,
                           cuda_sine_backward,
                           cuda_window};

}  // namespace flashgla::ops::hyena_filter
