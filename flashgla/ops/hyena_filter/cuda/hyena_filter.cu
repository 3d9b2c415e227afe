// Sines: a thread an element, or backward one of every few rows, whose terms of the frequencies' gradient a block adds
// up before they are written. The window: a vector a thread. A filter is made once for all sequences of a call.
#include "flashgla/ops/cuda/division.cuh"
#include "flashgla/ops/cuda/each_element.cuh"
#include "flashgla/ops/cuda/partial_sums.cuh"
#include "flashgla/ops/cuda/with_element.cuh"
#include "flashgla/ops/hyena_filter/decay.h"
#include "flashgla/ops/hyena_filter/implementations.h"

namespace flashgla::ops::hyena_filter {

namespace {

using bf16 = __nv_bfloat16;
using flashgla::cuda::from_float;
using flashgla::cuda::to_float;
using ops::cuda::Division;
using ops::cuda::Vector;

constexpr int kThreads = 256;

// A tensor [rows,D], its last dimension contiguous.
template <class T>
struct Matrix {
  T* data;
  std::int64_t stride;
  explicit Matrix(const TensorView& view) : data(static_cast<T*>(view.data)), stride(view.stride[0]) {}
  __device__ __forceinline__ T* at(std::int64_t row, std::int64_t d) const { return data + row * stride + d; }
};

// Of f32 or bf16.
struct Frequency {
  const void* data;
  bool wide;  // f32
  explicit Frequency(const TensorView& view) : data(view.data), wide(view.dtype == DType::f32) {}
  __device__ __forceinline__ float operator[](std::int64_t d) const {
    return wide ? static_cast<const float*>(data)[d] : to_float(static_cast<const bf16*>(data)[d]);
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    sine_kernel(Matrix<T> x, Frequency frequency, Matrix<T> y, std::int64_t rows, Division by_channels) {
  flashgla::cuda::wait_for_previous();
  const std::uint32_t item = blockIdx.x * kThreads + threadIdx.x, row = by_channels.of(item);
  const std::uint32_t d = item - row * by_channels.by;
  if (row < rows) *y.at(row, d) = from_float<T>(sinf(frequency[d] * to_float(*x.at(row, d))));
}

// Blocks of threads of the backward: kAcross channels by kDown rows, kBatch times.
constexpr int kAcross = 64, kDown = kThreads / kAcross, kBatch = 4;
constexpr std::int64_t kBlocksAtOnce = 264;  // two for each multiprocessor of a large GPU

template <class T>
__global__ void __launch_bounds__(kThreads)
    sine_backward_kernel(Matrix<T> x, Frequency frequency, Matrix<T> dy, Matrix<T> dx, ops::cuda::PartialSums partial,
                         std::int64_t tiles) {
  flashgla::cuda::wait_for_previous();
  flashgla::cuda::release_next();
  __shared__ float shared[kDown][kAcross];
  const std::int64_t block = blockIdx.x / tiles, end = partial.end(block);
  const int across = threadIdx.x % kAcross, down = threadIdx.x / kAcross;
  const std::int64_t d = (blockIdx.x - block * tiles) * kAcross + across;
  float total = 0.0f;
  if (d < partial.columns) {
    const float own = frequency[d];
    for (std::int64_t first = partial.begin(block) + down; first < end; first += kDown * kBatch) {
      float value[kBatch], gradient[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const std::int64_t row = first + k * kDown;
        value[k] = row < end ? to_float(*x.at(row, d)) : 0.0f;
        gradient[k] = row < end ? to_float(*dy.at(row, d)) : 0.0f;
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const std::int64_t row = first + k * kDown;
        const float slope = gradient[k] * cosf(own * value[k]);
        total = fmaf(slope, value[k], total);
        if (row < end) *dx.at(row, d) = from_float<T>(slope * own);
      }
    }
  }
  shared[down][across] = total;
  __syncthreads();
  if (down != 0 || d >= partial.columns) return;
#pragma unroll
  for (int i = 1; i < kDown; ++i) total += shared[i][across];
  partial.sums[block * partial.columns + d] = total;
}

// by_vectors: of a row.
template <class From, class To, int N>
__global__ void __launch_bounds__(kThreads) window_kernel(Matrix<From> x, Matrix<To> y, float first, float step,
                                                          float shift, std::int64_t rows, Division by_vectors) {
  flashgla::cuda::release_next_of_waves();
  flashgla::cuda::wait_for_previous();
  const std::uint32_t item = blockIdx.x * kThreads + threadIdx.x, row = by_vectors.of(item);
  const std::uint32_t d = (item - row * by_vectors.by) * N;
  if (row >= rows) return;
  const auto values = Vector<From, N>::load(x.at(row, d));
  const float t = static_cast<float>(row);
  float out[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    out[i] = values[i] * (expf(-t * fmaf(step, static_cast<float>(d + i), first)) + shift);
  }
  Vector<To, N>::of(out).store(y.at(row, d));
}

// Blocks for so many threads a row.
std::int64_t blocks_of(const TensorView& x, std::int64_t each) {
  const std::int64_t threads = x.size(0) * each;
  if (threads > 0x7fffffff - kThreads) throw Error("hyena_filter: too large for one launch");
  return (threads + kThreads - 1) / kThreads;
}
Division division_by(std::int64_t each) {
  return Division(static_cast<std::uint32_t>(std::max<std::int64_t>(each, 1)));
}

void cuda_sine_forward(Context& context, const TensorView& x, const TensorView& frequency, const TensorView& y) {
  if (context.planning()) return;
  ops::cuda::with_element(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    ops::cuda::queue_kernel(context, "hyena_filter", sine_kernel<T>, blocks_of(x, x.size(1)), kThreads, 0, Matrix<T>(x),
                            Frequency(frequency), Matrix<T>(y), x.size(0), division_by(x.size(1)));
  });
}

void cuda_sine_backward(Context& context, const TensorView& x, const TensorView& frequency, const TensorView& dy,
                        const TensorView& dx, const TensorView& dfrequency) {
  const ArenaScope scope(context.scratch());
  const std::int64_t tiles = (x.size(1) + kAcross - 1) / kAcross;
  const auto partial = ops::cuda::take_partial_sums(
      context, x.size(0), x.size(1), std::max<std::int64_t>(1, kBlocksAtOnce / std::max<std::int64_t>(tiles, 1)), kDown,
      "hyena_filter: sums");
  if (context.planning()) return;
  ops::cuda::with_element(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    ops::cuda::queue_kernel(context, "hyena_filter", sine_backward_kernel<T>, partial.blocks() * tiles, kThreads, 0,
                            Matrix<T>(x), Frequency(frequency), Matrix<T>(dy), Matrix<T>(dx), partial, tiles);
  });
  ops::cuda::reduce(context, partial, dfrequency.as<float>(), true);
}

void cuda_window(Context& context, const TensorView& x, const Window& window, const TensorView& y) {
  if (context.planning()) return;
  const Decays decays(x.size(1));
  const double row = 1.0 / static_cast<double>(window.length - 1);
  ops::cuda::with_element(x.dtype, [&](auto from) {
    ops::cuda::with_element(y.dtype, [&](auto to) {
      using From = decltype(from);
      using To = decltype(to);
      const auto queue = [&](auto each) {
        constexpr int N = decltype(each)::value;
        const std::int64_t vectors = x.size(1) / N;
        ops::cuda::queue_kernel(context, "hyena_filter", window_kernel<From, To, N>, blocks_of(x, vectors), kThreads, 0,
                                Matrix<From>(x), Matrix<To>(y), static_cast<float>(decays.first * row),
                                static_cast<float>(decays.step * row), static_cast<float>(window.shift), x.size(0),
                                division_by(vectors));
      };
      constexpr int kWide = 4;
      const bool whole = x.size(1) % kWide == 0 && ops::cuda::are_aligned({&x, &y}, kWide);
      whole ? queue(std::integral_constant<int, kWide>()) : queue(std::integral_constant<int, 1>());
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
