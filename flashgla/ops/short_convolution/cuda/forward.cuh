// A thread takes some neighbouring channels of a few tokens, and reads the tokens before that these need: no thread
// waits for another, and blocks that run at a time lie close together in memory.
#pragma once

#include "flashgla/ops/cuda/division.cuh"
#include "flashgla/ops/short_convolution/cuda/call.cuh"

namespace flashgla::ops::short_convolution::cuda {

constexpr int kForwardTokens = 8;    // of a thread
constexpr int kForwardElements = 2;  // channels of a thread, where their number and addresses are multiples of it
constexpr int kForwardDown = 2;      // of a block along time
constexpr int kForwardThreads = kAcross * kForwardDown;
constexpr int kTile = kForwardDown * kForwardTokens;

// Reads K tokens from `first` on; 0 where the line has none.
template <int K, int N, class T>
__device__ __forceinline__ void read(const Call& call, const Lines<T>& x, std::int64_t line, std::int64_t first,
                                     std::int64_t d, Vector<T, N> (&out)[K]) {
  const T* from = x.at(line, first, d);
  if (first >= 0 && first + K <= call.length) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      out[k] = Vector<T, N>::load(from);
      from += x.token_stride;
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < K; ++k) {
    out[k] = first + k >= 0 && first + k < call.length ? Vector<T, N>::load(from) : Vector<T, N>::zero();
    from += x.token_stride;
  }
}

// `blocks`: of all but states, tiles by slices of channels; the divisions are by how many there are of a line.
template <int W, int N, class T, bool kSilu, bool kBias>
__global__ void __launch_bounds__(kForwardThreads, sizeof(T) == 2 ? 10 : 8)
    forward_kernel(Call call, ops::cuda::Division by_slices, ops::cuda::Division by_tiles, std::int64_t blocks,
                   Lines<T> x, Lines<T> y, float* final_state) {
  flashgla::cuda::release_next_of_waves();
  flashgla::cuda::wait_for_previous();
  if (blockIdx.x >= blocks) {
    for_state(call, blocks, [&](const Place& place, std::int64_t line, std::int64_t d) {
      float state[W - 1];  // all on their way before the first is written
#pragma unroll
      for (int i = 0; i < W - 1; ++i) state[i] = extended<W>(call, x, place, line, d, place.end - place.begin + i);
#pragma unroll
      for (int i = 0; i < W - 1; ++i) final_state[state_at<W>(call, place.n, d, i)] = state[i];
    });
    return;
  }
  const std::uint32_t tile = by_slices.of(blockIdx.x), above = by_tiles.of(tile);
  const std::int64_t d = std::int64_t{(blockIdx.x - tile * by_slices.by) * kAcross + threadIdx.x % kAcross} * N;
  const std::int64_t line = above;
  const std::int64_t begin = std::int64_t{tile - above * by_tiles.by} * kTile + threadIdx.x / kAcross * kForwardTokens;
  if (d >= call.channels || begin >= call.length) return;
  constexpr int K = kForwardTokens + W - 1;
  Vector<T, N> held[K];
  read<K, N>(call, x, line, begin - (W - 1), d, held);
  const Filter<W, N, kBias> filter(call, d);
  T* to = y.at(line, begin, d);
  Place place{line, 0, call.length};
  bool inside = begin >= W - 1 && begin + kForwardTokens <= call.length;
  if (call.cu_seqlens != nullptr) {
    place = ops::cuda::place_at(call, line, begin);
    inside = begin - (W - 1) >= place.begin && begin + kForwardTokens <= place.end;
  }
  if (inside) {
    float e[K][N];
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
      for (int i = 0; i < N; ++i) e[k][i] = held[k][i];
    }
    constexpr int kAtOnce = 2;
#pragma unroll
    for (int first = 0; first < kForwardTokens; first += kAtOnce) {
      float out[kAtOnce][N];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
        for (int i = 0; i < N; ++i) out[k][i] = filter.convolved(e, first + k, i);
      }
      if constexpr (kSilu) {
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
          for (int i = 0; i < N; ++i) out[k][i] = silu_of_scaled(out[k][i]);
        }
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        Vector<T, N>::of(out[k]).store(to);
        to += y.token_stride;
      }
    }
    return;
  }
#pragma unroll 1
  for (std::int64_t t = begin; t < call.length && t < begin + kForwardTokens; ++t) {
    if (t >= place.end) place = ops::cuda::place_after(call, place, t);
    float window[W - 1][N], e[W][N], out[N];
    inputs_before<W, N>(call, x, line, place, t, d, window);
    load<N>(x.at(line, t, d), e[W - 1]);
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
      for (int j = 0; j < W - 1; ++j) e[j][i] = window[j][i];
      out[i] = filter.convolved(e, 0, i);
      if (call.silu) out[i] = silu_of_scaled(out[i]);
    }
    Vector<T, N>::of(out).store(to);
    to += y.token_stride;
  }
}

}  // namespace flashgla::ops::short_convolution::cuda
