// One block a row of logits, which it reads once, keeps in registers, and writes once as the gradient. Rows too long
// for that are read twice.
#include <algorithm>
#include <bit>
#include <limits>

#include "flashgla/base/cuda/sums.cuh"
#include "flashgla/base/cuda/vectors.cuh"
#include "flashgla/ops/cross_entropy/cuda/losses.h"
#include "flashgla/ops/cuda/first_bad.cuh"
#include "flashgla/ops/cuda/math.cuh"
#include "flashgla/ops/cuda/queue_kernel.cuh"
#include "flashgla/ops/cuda/with_element.cuh"

namespace flashgla::ops::cross_entropy::cuda {

namespace {

using flashgla::cuda::kVectorOf;
using flashgla::cuda::kWarp;
using flashgla::cuda::Vector;

constexpr int kMostThreads = 1024;
constexpr int kHitThreads = 256;
constexpr int kMostVectors = 8;  // of 16 bytes that a thread keeps
constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <class T>
struct Logits {
  T* data;
  std::int64_t row_stride;
  int words;  // targets are no wider
  const std::int32_t* targets;
  float* losses;
  bool gradient;
  float scale;
  std::int32_t* bad_target;
  std::int64_t first_row;
};

template <class T>
__device__ __forceinline__ float exponential(float x) {
  if constexpr (sizeof(T) == 2) return ops::cuda::power_of_two(1.44269504f * x);
  return expf(x);
}

__device__ __forceinline__ float block_max(float x, float* shared) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
  if (lane == 0) shared[warp] = x;
  __syncthreads();
  x = shared[lane < warps ? lane : 0];
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
  return x;
}

// Calls visit(element, word) for those of a vector's elements that are words.
template <int N, class T, class Visit>
__device__ __forceinline__ void for_each_word(const Vector<T, N>& vector, std::int64_t first, std::int64_t words,
                                              const Visit& visit) {
#pragma unroll
  for (int j = 0; j < N; ++j) {
    if (first + j < words) visit(vector[j], j);
  }
}

// Elements behind the row's end are -inf, which no maximum is and whose exponentials are zeros: tests for the end at
// each element were most of the kernel's instructions.
template <int N, class T>
__device__ __forceinline__ Vector<T, N> load_words(const T* row, int first, int words) {
  float values[N];
  if (first + N <= words) return Vector<T, N>::load(row + first);
#pragma unroll
  for (int j = 0; j < N; ++j) values[j] = first + j < words ? flashgla::cuda::to_float(row[first + j]) : -kInfinity;
  return Vector<T, N>::of(values);
}

// What lets ptxas keep no element of a vector as f32 beside it, for which there are no registers.
template <int N, class T>
__device__ __forceinline__ void keep_packed(Vector<T, N>& z) {
#pragma unroll
  for (int i = 0; i < Vector<T, N>::kWords; ++i) asm volatile("" : "+r"(z.words[i]));
}

template <int N, class T>
__device__ __forceinline__ float larger_of(float largest, const Vector<T, N>& z) {
#pragma unroll
  for (int j = 0; j < N; ++j) largest = fmaxf(largest, z[j]);
  return largest;
}

template <int N, class T>
__device__ __forceinline__ float sum_of_exponentials(float total, const Vector<T, N>& z, float largest) {
#pragma unroll
  for (int j = 0; j < N; ++j) total += exponential<T>(z[j] - largest);
  return total;
}

template <int N, class T>
__device__ __forceinline__ void store_gradient(T* row, const Vector<T, N>& z, int first, int target, float largest,
                                               float factor, float scale) {
  float out[N];
#pragma unroll
  for (int j = 0; j < N; ++j) out[j] = exponential<T>(z[j] - largest) * factor;
  if (const int at = target - first; at >= 0 && at < N) {
#pragma unroll
    for (int j = 0; j < N; ++j) out[j] -= j == at ? scale : 0.0f;
  }
  Vector<T, N>::of(out).store(row + first);
}

// kVectors: how many each thread keeps; 0: none, the row is read a second time.
template <int kVectors, class T>
__global__ void __launch_bounds__(kVectors == kMostVectors ? 512 : kMostThreads, kVectors == kMostVectors ? 2 : 1)
    losses_kernel(const Logits<T> p) {
  constexpr int N = kVectorOf<T>;
  __shared__ float shared[2][kWarp];
  flashgla::cuda::wait_for_previous();
  const std::int64_t row_index = blockIdx.x;
  const int apart = static_cast<int>(blockDim.x) * N, begin = static_cast<int>(threadIdx.x) * N;
  T* row = p.data + row_index * p.row_stride;
  const int target = p.targets[row_index];
  if (target < 0 || target >= p.words) {
    if (threadIdx.x == 0) {
      p.losses[row_index] = target == -1 ? 0.0f : __uint_as_float(0x7fc00000u);
      if (target != -1) flashgla::ops::cuda::note_bad(p.bad_target, p.first_row + row_index);
    }
    for (int first = begin; p.gradient && first < p.words; first += apart) Vector<T, N>::zero().store(row + first);
    return;
  }
  const float z_target = flashgla::cuda::to_float(row[target]);
  Vector<T, N> kept[kVectors > 0 ? kVectors : 1];
  float largest = -kInfinity, total = 0.0f;
  if constexpr (kVectors > 0) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) kept[i] = load_words<N>(row, begin + i * apart, p.words);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) largest = larger_of(largest, kept[i]);
    largest = block_max(largest, shared[0]);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      keep_packed(kept[i]);
      total = sum_of_exponentials(total, kept[i], largest);
    }
  } else {
    float own = largest;
    for (int first = begin; first < p.words; first += apart) {
      const Vector<T, N> z = load_words<N>(row, first, p.words);
      const float higher = larger_of(own, z);
      if (higher > own) total *= exponential<T>(own - higher);
      own = higher;
      total = sum_of_exponentials(total, z, own);
    }
    largest = block_max(own, shared[0]);
    if (own < largest) total *= exponential<T>(own - largest);
  }
  total = flashgla::cuda::block_sum(total, shared[1]);
  // The barrier in between lets nobody write before all have read their target.
  if (threadIdx.x == 0) p.losses[row_index] = (largest - z_target) + logf(total);
  if (!p.gradient) return;
  const float factor = p.scale / total;
  if constexpr (kVectors > 0) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int first = begin + i * apart;
      keep_packed(kept[i]);
      if (first < p.words) store_gradient(row, kept[i], first, target, largest, factor, p.scale);
    }
  } else {
    for (int first = begin; first < p.words; first += apart) {
      store_gradient(row, load_words<N>(row, first, p.words), first, target, largest, factor, p.scale);
    }
  }
}

// A block a row: how many logits are as large as the target's, which is one of them.
template <class T>
__global__ void __launch_bounds__(kHitThreads) hits_kernel(const T* logits, std::int64_t row_stride, std::int64_t words,
                                                           const std::int32_t* targets, float* hits) {
  constexpr int N = kVectorOf<T>;
  __shared__ float shared[kWarp];
  flashgla::cuda::wait_for_previous();
  const T* row = logits + blockIdx.x * row_stride;
  const std::int64_t target = targets[blockIdx.x];
  float as_large = 0.0f;
  if (target >= 0 && target < words) {
    const float own = flashgla::cuda::to_float(row[target]);
    for (std::int64_t first = std::int64_t{threadIdx.x} * N; first < words; first += kHitThreads * N) {
      for_each_word(Vector<T, N>::load(row + first), first, words,
                    [&](float z, int) { as_large += z >= own ? 1.0f : 0.0f; });
    }
  }
  as_large = flashgla::cuda::block_sum(as_large, shared);
  if (threadIdx.x == 0) hits[blockIdx.x] = as_large == 1.0f ? 1.0f : 0.0f;
}

template <class T>
void queue(Context& context, std::int64_t rows, const Logits<T>& p) {
  const int vectors = (p.words + kVectorOf<T> - 1) / kVectorOf<T>;
  const auto wanted = static_cast<std::uint64_t>((vectors + kMostVectors - 1) / kMostVectors);
  const int threads = static_cast<int>(std::clamp<std::uint64_t>(std::bit_ceil(wanted), 128, 512));
  const int each = (vectors + threads - 1) / threads;
  const auto launch = [&](auto* kernel, int block) {
    ops::cuda::queue_kernel(context, "cross_entropy: losses", kernel, rows, block, 0, p);
  };
  if (each <= 1) return launch(losses_kernel<1, T>, threads);
  if (each <= 2) return launch(losses_kernel<2, T>, threads);
  if (each <= 4) return launch(losses_kernel<4, T>, threads);
  if (each <= kMostVectors) return launch(losses_kernel<kMostVectors, T>, threads);
  launch(losses_kernel<0, T>, kMostThreads);
}

}  // namespace

void take_losses(Context& context, const TensorView& logits, const std::int32_t* targets, float* losses, bool gradient,
                 double scale, std::int32_t* bad_target, std::int64_t first_row) {
  ops::cuda::with_element(logits.dtype, [&](auto zero) {
    using T = decltype(zero);
    queue<T>(context, logits.size(0),
             {static_cast<T*>(logits.data), logits.stride[0], static_cast<int>(logits.size(1)), targets, losses,
              gradient, static_cast<float>(scale), bad_target, first_row});
  });
}

void take_hits(Context& context, const TensorView& logits, const std::int32_t* targets, float* hits) {
  ops::cuda::with_element(logits.dtype, [&](auto zero) {
    using T = decltype(zero);
    ops::cuda::queue_kernel(context, "cross_entropy: hits", hits_kernel<T>, logits.size(0), kHitThreads, 0,
                            static_cast<const T*>(logits.data), logits.stride[0], logits.size(1), targets, hits);
  });
}

}  // namespace flashgla::ops::cross_entropy::cuda
