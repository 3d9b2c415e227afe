// Direct sums. A thread has kSide neighbouring outputs of one channel and walks what they are sums of in steps of
// kSide: of kSide x kSide products each element of both sides is read once.
#pragma once

#include "flashgla/ops/long_convolution/cuda/call.cuh"

namespace flashgla::ops::long_convolution::cuda {

constexpr int kDirectThreads = 128;
constexpr int kSide = 8;

// sums[i] += sum over s in [begin, end) of a(s) b(s + i) where kUp, of a(s) b(s - i) else.
template <bool kUp, class A, class B>
__device__ __forceinline__ void accumulate(std::int64_t begin, std::int64_t end, const A& a, const B& b,
                                           float (&sums)[kSide]) {
  float window[2 * kSide];  // b from the lowest index that the step needs
  const auto lowest = [&](std::int64_t s) { return kUp ? s : s - (kSide - 1); };
#pragma unroll
  for (int i = 0; i < kSide; ++i) window[kSide + i] = b(lowest(begin) + i);
  for (std::int64_t s = begin; s < end; s += kSide) {
    float own[kSide];
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      window[i] = window[kSide + i];
      own[i] = s + i < end ? a(s + i) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kSide; ++i) window[kSide + i] = b(lowest(s) + kSide + i);
#pragma unroll
    for (int step = 0; step < kSide; ++step) {
#pragma unroll
      for (int i = 0; i < kSide; ++i) {
        sums[i] = fmaf(own[step], window[kUp ? step + i : step + (kSide - 1) - i], sums[i]);
      }
    }
  }
}

// Where a thread stands: kSide rows of a line from `first` on, and its channel.
struct Where {
  std::int64_t line, first, channel;

  __device__ __forceinline__ Where(std::int64_t channels, std::int64_t rows) {
    const std::int64_t item = std::int64_t{blockIdx.x} * kDirectThreads + threadIdx.x, above = item / channels;
    const std::int64_t blocks = (rows + kSide - 1) / kSide;
    channel = item - above * channels;
    line = above / blocks;
    first = (above - line * blocks) * kSide;
  }
};

// out = the causal sum of x (backward: of `from`, a gradient, from each token on), and the skip.
template <class T, bool kBackward>
__global__ void __launch_bounds__(kDirectThreads) sum_kernel(Call<T> call, Lines<T> from, Lines<T> out) {
  flashgla::cuda::wait_for_previous();
  const Where where(call.channels, call.length);
  if (where.line >= call.lines) return;
  const std::int64_t d = where.channel;
  for (std::int64_t t = where.first; t < where.first + kSide && t < call.length;) {  // a sequence's share at a time
    const Place place = call.place_at(where.line, t);
    if (call.transforms && place.by_transforms()) {
      t = place.begin + place.length;
      continue;
    }
    const std::int64_t index = place.past + t - place.begin, last = place.past + place.length;
    float sums[kSide] = {};
    const auto filter = [&](std::int64_t j) { return call.filter_at(place, j, d); };
    if (kBackward) {
      // out(index + i) = sum over s from index on of from(s) f(s - index - i)
      accumulate<false>(
          0, last - index, [&](std::int64_t s) { return to_float(*from.at(place.line, t + s, d)); }, filter, sums);
    } else {
      // out(index + i) = sum over s of x(s) f(index + i - s): from the newest token back, as sum over u of
      // x(index + kSide - 1 - u) f(u - (kSide - 1) + i)
      accumulate<true>(
          0, index + kSide, [&](std::int64_t u) { return call.token(place, index + kSide - 1 - u, d); },
          [&](std::int64_t u) { return filter(u - (kSide - 1)); }, sums);
    }
    std::int64_t stop = where.first + kSide;
    if (stop > place.begin + place.length) stop = place.begin + place.length;
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      if (t + i >= stop) break;
      const float own = kBackward ? to_float(*from.at(place.line, t + i, d)) : call.token(place, index + i, d);
      *out.at(place.line, t + i, d) = from_float<T>(fmaf(call.skip[d], own, sums[i]));
    }
    t = stop;
  }
}

// sums [kGroups,L,D]: sum over a group's sequences and their tokens of dy(t) x(t - j), for kSide neighbouring j.
template <class T>
__global__ void __launch_bounds__(kDirectThreads)
    filter_kernel(Call<T> call, Lines<T> dy, std::int64_t rows, std::int64_t groups, float* sums) {
  flashgla::cuda::wait_for_previous();
  const Where where(call.channels, rows);  // a line is a group
  if (where.line >= groups) return;
  const std::int64_t d = where.channel;
  float totals[kSide] = {};
  for (std::int64_t n = where.line; n < call.sequences; n += groups) {
    const Place place = call.place_of(n);
    if (call.transforms && place.by_transforms()) continue;
    // Tokens before the past have none of it: those from where x(t - first) is there on.
    const std::int64_t begin = where.first > place.past ? where.first - place.past : 0;
    accumulate<false>(
        begin, place.length, [&](std::int64_t t) { return to_float(*dy.at(place.line, place.begin + t, d)); },
        [&](std::int64_t t) { return call.token(place, place.past + t - where.first, d); }, totals);
  }
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
    if (where.first + i < rows) sums[(where.line * rows + where.first + i) * call.channels + d] = totals[i];
  }
}

// One token a sequence behind its past: kStepChannels channels of a sequence a block, whose warps share out the past.
constexpr int kStepChannels = 32, kStepWarps = 32, kStepThreads = kStepChannels * kStepWarps;

template <class T>
__global__ void __launch_bounds__(kStepThreads) step_kernel(Call<T> call, Lines<T> y) {
  flashgla::cuda::wait_for_previous();
  __shared__ float sums[kStepWarps][kStepChannels];
  const std::int64_t groups = (call.channels + kStepChannels - 1) / kStepChannels, n = blockIdx.x / groups;
  const int lane = static_cast<int>(threadIdx.x) % kStepChannels, warp = static_cast<int>(threadIdx.x) / kStepChannels;
  const std::int64_t d = (blockIdx.x - n * groups) * kStepChannels + lane;
  const bool there = d < call.channels;
  const std::int64_t past = call.positions[n];
  const auto walk = [&](const auto* tokens) {
    float sum = 0.0f;
    tokens += n * call.room * call.channels + d;
#pragma unroll 8
    for (std::int64_t j = 1 + warp; j <= past; j += kStepWarps) {
      sum = fmaf(call.filter[j * call.channels + d], to_float(tokens[(past - j) * call.channels]), sum);
    }
    return sum;
  };
  if (there) {
    sums[warp][lane] = call.wide_past ? walk(static_cast<const float*>(call.past))
                                      : walk(static_cast<const __nv_bfloat16*>(call.past));
  }
  __syncthreads();
  if (!there || warp > 0) return;
  float sum = (call.filter[d] + call.skip[d]) * to_float(*call.x.at(n, 0, d));
#pragma unroll
  for (int i = 0; i < kStepWarps; ++i) sum += sums[i][lane];
  *y.at(n, 0, d) = from_float<T>(sum);
}

}  // namespace flashgla::ops::long_convolution::cuda
