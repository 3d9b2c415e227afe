// What forward and backward share. Notation as in reference.cpp. A block of threads has kAcross places along channels,
// some along time.
#pragma once

#include "flashgla/ops/cuda/each_element.cuh"
#include "flashgla/ops/cuda/lines.cuh"
#include "flashgla/ops/cuda/math.cuh"

namespace flashgla::ops::short_convolution::cuda {

using ops::cuda::Lines;
using ops::cuda::Place;
using ops::cuda::Vector;
using bf16 = __nv_bfloat16;

constexpr int kAcross = 64;
// What every kernel of a call knows. A line is one row of the batch: one sequence, or with cu_seqlens all of them.
struct Call {
  std::int64_t lines, length, channels;
  std::int64_t sequences;
  const void* cu_seqlens;      // null: each line is a sequence
  bool wide_boundaries;        // i64
  const void* weight;          // [D,W]
  const void* bias;            // [D]; null: zeros
  bool wide_weight;            // f32, and the bias
  const float* initial_state;  // [N,D,W-1]; null: zeros
  bool silu;

  __device__ __forceinline__ std::int64_t boundary(std::int64_t n) const {
    return wide_boundaries ? static_cast<const std::int64_t*>(cu_seqlens)[n]
                           : static_cast<const std::int32_t*>(cu_seqlens)[n];
  }
  __device__ __forceinline__ float weight_at(std::int64_t i) const { return parameter(weight, i); }
  __device__ __forceinline__ float bias_at(std::int64_t d) const { return bias == nullptr ? 0.0f : parameter(bias, d); }
  __device__ __forceinline__ float parameter(const void* from, std::int64_t i) const {
    return wide_weight ? static_cast<const float*>(from)[i]
                       : flashgla::cuda::to_float(static_cast<const bf16*>(from)[i]);
  }
  // Pieces of so many tokens that all lines are cut into.
  __host__ __device__ __forceinline__ std::int64_t pieces_of_line(int tokens) const {
    return (length + tokens - 1) / tokens;
  }
  __host__ __device__ __forceinline__ std::int64_t pieces(int tokens) const { return lines * pieces_of_line(tokens); }
  // Of channels, where a thread takes `elements`.
  __host__ __device__ __forceinline__ std::int64_t slices(int elements) const {
    return (channels + kAcross * elements - 1) / (kAcross * elements);
  }
  std::int64_t state_blocks(int threads) const { return (sequences * channels + threads - 1) / threads; }
};

// Sequence n; with cu_seqlens or without.
__device__ __forceinline__ Place sequence(const Call& call, std::int64_t n) {
  return call.cu_seqlens == nullptr ? Place{n, 0, call.length} : ops::cuda::place_of(call, n);
}

template <int N, class T>
__device__ __forceinline__ void load(const T* from, float (&out)[N]) {
  const Vector<T, N> vector = Vector<T, N>::load(from);
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = vector[i];
}

// Element i of a channel's state [N,D,W-1].
template <int W>
__device__ __forceinline__ std::int64_t state_at(const Call& call, std::int64_t n, std::int64_t d, int i) {
  return (n * call.channels + d) * (W - 1) + i;
}

constexpr float kLog2OfE = 1.44269504f, kLn2 = 0.69314718f;

// The filter and biases of N channels from d on. Before SiLU they are multiplied by -log2(e), so that z comes as the
// power of two that a sigmoid needs. kBias: there may be biases.
template <int W, int N, bool kBias>
struct Filter {
  float weight[W][N], bias[N], factor;

  __device__ __forceinline__ Filter(const Call& call, std::int64_t d) : factor(call.silu ? -kLog2OfE : 1.0f) {
    float flat[W][N];  // as they lie
    if (N > 1 && call.wide_weight) {
#pragma unroll
      for (int j = 0; j < W; ++j) load<N>(static_cast<const float*>(call.weight) + d * W + j * N, flat[j]);
    } else {
#pragma unroll
      for (int j = 0; j < W; ++j) {
        if constexpr (N == 1) {
          flat[j][0] = call.weight_at(d * W + j);
        } else {
          load<N>(static_cast<const bf16*>(call.weight) + d * W + j * N, flat[j]);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < W; ++j) {
#pragma unroll
      for (int i = 0; i < N; ++i) weight[j][i] = factor * flat[(i * W + j) / N][(i * W + j) % N];
    }
#pragma unroll
    for (int i = 0; i < N; ++i) bias[i] = kBias ? factor * call.bias_at(d + i) : 0.0f;
  }

  // z of channel i, times the factor; its W inputs are e[first..].
  template <int K>
  __device__ __forceinline__ float convolved(const float (&e)[K][N], int first, int i) const {
    float z = fmaf(weight[W - 1][i], e[first + W - 1][i], bias[i]);
#pragma unroll
    for (int j = 0; j < W - 1; ++j) z = fmaf(weight[j][i], e[first + j][i], z);
    return z;
  }
};

__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// SiLU of the z that is -1 / log2(e) of what is given.
__device__ __forceinline__ float silu_of_scaled(float z) {
  return z * reciprocal(fmaf(ops::cuda::power_of_two(z), -kLog2OfE, -kLog2OfE));
}

// -1 / log2(e) of dz, so that the filter times it is what x gets; z as above.
__device__ __forceinline__ float scaled_gradient(float z, float dy) {
  const float s = reciprocal(1.0f + ops::cuda::power_of_two(z));
  return dy * s * fmaf(z, fmaf(s, -kLn2 * kLn2, kLn2 * kLn2), -kLn2);
}

// The inputs before token t of `place`, oldest first.
template <int W, int N, class T>
__device__ __forceinline__ void inputs_before(const Call& call, const Lines<T>& x, std::int64_t line,
                                              const Place& place, std::int64_t t, std::int64_t d,
                                              float (&window)[W - 1][N]) {
#pragma unroll
  for (int j = 0; j < W - 1; ++j) {
    const std::int64_t source = t - (W - 1) + j;
    if (source >= place.begin) {
      load<N>(x.at(line, source, d), window[j]);
    } else {
      const int at = static_cast<int>(source - place.begin + (W - 1));
#pragma unroll
      for (int i = 0; i < N; ++i) {
        window[j][i] = call.initial_state ? call.initial_state[state_at<W>(call, place.n, d + i, at)] : 0.0f;
      }
    }
  }
}

// One channel of one sequence, at [i] of the states: the blocks behind the first `before`.
template <class Body>
__device__ __forceinline__ void for_state(const Call& call, std::int64_t before, const Body& body) {
  const std::int64_t item = (static_cast<std::int64_t>(blockIdx.x) - before) * blockDim.x + threadIdx.x;
  if (item >= call.sequences * call.channels) return;
  const Place place = sequence(call, item / call.channels);
  body(place, call.cu_seqlens ? 0 : place.n, item % call.channels);
}

// e[p], the sequence extended by its initial state in front.
template <int W, class T>
__device__ __forceinline__ float extended(const Call& call, const Lines<T>& x, const Place& place, std::int64_t line,
                                          std::int64_t d, std::int64_t p) {
  if (p >= W - 1) {
    return flashgla::cuda::to_float(*x.at(line, place.begin + p - (W - 1), d));
  }
  if (!call.initial_state) return 0.0f;
  return call.initial_state[state_at<W>(call, place.n, d, static_cast<int>(p))];
}

}  // namespace flashgla::ops::short_convolution::cuda
