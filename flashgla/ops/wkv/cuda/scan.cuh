// What the kernels share. A thread has V neighbouring channels of a segment of one line's tokens and walks it in
// chunks, whose inputs it asks for one chunk ahead. A line is a row of the batch: one sequence, or with cu_seqlens all
// of them. Segments meet by their ends: (a, b, p) of a segment alone, joined in order, is the state that each starts
// from.
#pragma once

#include <cstdint>

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/base/cuda/vectors.cuh"
#include "flashgla/ops/cuda/lines.cuh"
#include "flashgla/ops/cuda/math.cuh"

namespace flashgla::ops::wkv::cuda {

using flashgla::cuda::Vector;
using ops::cuda::Lines;
using ops::cuda::Place;
using ops::cuda::place_after;
using ops::cuda::place_at;
using ops::cuda::place_of;

constexpr int kThreads = 128;
constexpr int kChunk = 8;  // tokens
constexpr float kLog2E = 1.44269504f;
constexpr float kEmpty = -1e30f;  // the exponent of nothing

__device__ __forceinline__ float exponential(float x) { return ops::cuda::power_of_two(kLog2E * x); }

// What every kernel of a call knows.
template <class T>
struct Call {
  Lines<T> k, v, r;
  const float *time_decay, *time_first;
  const float* h0;                 // [N,3,E]; null: nothing
  const std::int32_t* cu_seqlens;  // null: each line is a sequence
  std::int64_t sequences, lines, length;
  int channels;
  std::int64_t segment;   // tokens of one, a multiple of kChunk
  std::int64_t segments;  // of a line
  float* prefixes;        // [lines,segments,3,E]: of a segment alone, then what it starts from; null with one segment

  __device__ __forceinline__ std::int64_t boundary(std::int64_t n) const { return cu_seqlens[n]; }
};

// Where a thread stands: its segment's tokens, its first channel.
struct Where {
  std::int64_t line, index, begin, end;
  int channel;
  bool there;

  template <class T>
  __device__ __forceinline__ Where(const Call<T>& call, int each) {
    const std::int64_t item = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
    const std::int64_t vectors = call.channels / each, above = item / vectors;
    channel = static_cast<int>(item - above * vectors) * each;
    line = above / call.segments;
    index = above - line * call.segments;
    there = line < call.lines;
    begin = index * call.segment;
    end = begin + call.segment < call.length ? begin + call.segment : call.length;
  }
};

// Whether a sequence begins in a segment.
template <class T>
__device__ __forceinline__ bool begins_in(const Call<T>& call, std::int64_t line, std::int64_t index) {
  const std::int64_t begin = index * call.segment, end = begin + call.segment;
  return place_at(call, line, (end < call.length ? end : call.length) - 1).begin >= begin;
}

template <int V>
struct Parameters {
  float w[V], u[V];

  Parameters() = default;
  template <class T>
  __device__ __forceinline__ Parameters(const Call<T>& call, int channel) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      w[i] = -expf(call.time_decay[channel + i]);
      u[i] = call.time_first[channel + i];
    }
  }
};

// Two exponents' larger, and e to each of them less that: one of the two is 1.
struct Weights {
  float largest, first, second;

  __device__ __forceinline__ Weights(float x, float y) {
    const float difference = x - y, smaller = exponential(-fabsf(difference));
    const bool ahead = difference >= 0.0f;
    largest = ahead ? x : y;
    first = ahead ? 1.0f : smaller;
    second = ahead ? smaller : 1.0f;
  }
  __device__ __forceinline__ float of(float x, float y) const { return fmaf(first, x, second * y); }
  __device__ __forceinline__ float with_one(float x) const { return fmaf(first, x, second); }
};

// A e^-p, B e^-p and p; of gradients P, Q and m likewise.
template <int V>
struct State {
  float a[V], b[V], p[V];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      a[i] = b[i] = 0.0f;
      p[i] = kEmpty;
    }
  }
  // From and to [3,E] at a channel.
  __device__ __forceinline__ void load(const float* from, int channels) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      a[i] = from[i];
      b[i] = from[channels + i];
      p[i] = from[2 * channels + i];
    }
  }
  __device__ __forceinline__ void store(float* to, int channels) const {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      to[i] = a[i];
      to[channels + i] = b[i];
      to[2 * channels + i] = p[i];
    }
  }
  // What sequence n starts from.
  template <class T>
  __device__ __forceinline__ void begin(const Call<T>& call, std::int64_t n, int channel) {
    clear();
    if (call.h0 == nullptr) return;
    load(call.h0 + n * 3 * call.channels + channel, call.channels);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      if (b[i] > 0.0f) continue;
      a[i] = b[i] = 0.0f;
      p[i] = kEmpty;
    }
  }
  // What a segment starts from.
  template <class T>
  __device__ __forceinline__ void begin(const Call<T>& call, const Where& where, const Place& place) {
    if (place.begin == where.begin) return begin(call, place.n, where.channel);
    load(call.prefixes + (where.line * call.segments + where.index) * 3 * call.channels + where.channel, call.channels);
  }
  // Behind a token.
  __device__ __forceinline__ void advance(const Parameters<V>& parameters, const float (&k)[V], const float (&v)[V]) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const Weights weights(p[i] + parameters.w[i], k[i]);
      a[i] = weights.of(a[i], v[i]);
      b[i] = weights.with_one(b[i]);
      p[i] = weights.largest;
    }
  }
};

// The elements of a chunk's tokens, all asked for at once; 0 where there are none.
template <class T, int V>
struct Tokens {
  Vector<T, V> vectors[kChunk];

  __device__ __forceinline__ void load(const Lines<T>& lines, const Where& where, std::int64_t first) {
#pragma unroll
    for (int t = 0; t < kChunk; ++t) {
      vectors[t] = Vector<T, V>::zero();
      if (first + t < where.end) {
        vectors[t] = Vector<T, V>::load(lines.at(where.line, first + t, where.channel));
      }
    }
  }
  __device__ __forceinline__ void get(int t, float (&values)[V]) const {
#pragma unroll
    for (int i = 0; i < V; ++i) values[i] = vectors[t][i];
  }
};

// Joins the ends of segments, a channel of a line a thread: each segment's place receives what it starts from. Forward
// in time that is the state before it; backward the gradient that comes from behind it.
template <class T, bool kForward>
__global__ void __launch_bounds__(kThreads) join_kernel(Call<T> call, float* ends) {
  flashgla::cuda::wait_for_previous();
  const std::int64_t item = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (item >= call.lines * call.channels) return;
  const std::int64_t line = item / call.channels;
  const int channel = static_cast<int>(item - line * call.channels);
  const Parameters<1> parameters(call, channel);
  const auto place = [&](std::int64_t step) {
    const std::int64_t index = kForward ? step : call.segments - 1 - step;
    return ends + (line * call.segments + index) * 3 * call.channels + channel;
  };
  constexpr int kAhead = 8;  // segments whose ends are asked for at once; the last one's end is nobody's start
  State<1> carried, alone[kAhead];
  carried.clear();
  for (std::int64_t step = 0; step < call.segments; step += kAhead) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      alone[i].clear();
      if (step + i < call.segments - 1) alone[i].load(place(step + i), call.channels);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (step + i >= call.segments) break;
      carried.store(place(step + i), call.channels);
      const std::int64_t index = kForward ? step + i : call.segments - 1 - step - i;
      const std::int64_t begin = index * call.segment, rest = call.length - begin;
      if (begins_in(call, line, index)) {
        carried = alone[i];
        continue;
      }
      const auto tokens = static_cast<float>(rest < call.segment ? rest : call.segment);
      const Weights weights(fmaf(tokens, parameters.w[0], carried.p[0]), alone[i].p[0]);
      carried.a[0] = weights.of(carried.a[0], alone[i].a[0]);
      carried.b[0] = weights.of(carried.b[0], alone[i].b[0]);
      carried.p[0] = weights.largest;
    }
  }
}

}  // namespace flashgla::ops::wkv::cuda
