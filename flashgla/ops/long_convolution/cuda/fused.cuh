// Sequences of at most kPoints tokens, each in one transform: nothing but x, y and the filter's spectrum goes through
// memory. A block has its channels of every chunks-th sequence.
#pragma once

#include "flashgla/base/cuda/ptx.cuh"
#include "flashgla/ops/long_convolution/cuda/transform.cuh"

namespace flashgla::ops::long_convolution::cuda {

// Shared memory of backward: of a transform, and the spectrum of x.
constexpr int kBackwardBytes = Transform::kBytes + kPointBytes;

// Spectra in memory as threads have them: [count,blocks,groups of channels,kOwn,kThreads].
struct Spectra {
  float2* data;
  std::int64_t blocks, groups;
  std::int64_t first = 0;  // of the channels' groups

  static constexpr std::int64_t kOfGroup = std::int64_t{kOwn} * kThreads;
  __host__ __device__ std::int64_t step() const { return groups * kOfGroup; }  // from block to block
  // A thread's first; kThreads lie between its next ones.
  __device__ __forceinline__ float2* at(std::int64_t n, std::int64_t block, std::int64_t group) const {
    return data + ((n * blocks + block) * groups + group) * kOfGroup + threadIdx.x;
  }
};

// Which block of a grid of a spectrum's groups and of chunks of sequences this is.
struct Share {
  int channel, chunk, group;
  bool there;  // whether the channel is

  template <class T>
  __device__ __forceinline__ Share(const Call<T>& call, const Transform& transform, const Spectra& spectra) {
    const int channels = static_cast<int>(call.channels), groups = static_cast<int>(spectra.groups);
    chunk = static_cast<int>(blockIdx.x) / groups;
    group = static_cast<int>(blockIdx.x) - chunk * groups;
    channel = (static_cast<int>(spectra.first) + group) * kChannels + transform.channel();
    there = channel < channels;
    if (!there) channel = channels - 1;  // to be read, not to be written
  }
};

// A thread's tokens of a sequence in a tensor: from index `from` on, kLanes apart. Pointers walk, since products of
// strides would be kept over the sequences, more of them than there are registers.
template <class T>
struct Walk {
  T* at;
  std::int64_t step;
  int first, length;  // token, of those in the tensor; it may be negative

  __device__ __forceinline__ Walk(const Lines<T>& lines, const Transform& transform, const Place& place,
                                  std::int64_t from, std::int64_t channel)
      : step(kLanes * lines.token_stride),
        first(static_cast<int>(from - place.past) + transform.token(0)),
        length(static_cast<int>(place.length)) {
    at = lines.data + place.line * lines.line_stride + (place.begin + first) * lines.token_stride + channel;
  }
  __device__ __forceinline__ bool there(int j) const {
    return static_cast<unsigned>(first + kLanes * j) < static_cast<unsigned>(length);
  }
};

// Zeros where the tensor has none.
template <class T>
__device__ __forceinline__ void load_tokens(Walk<T> walk, float2 (&v)[kOwn]) {
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    v[j] = {walk.there(j) ? to_float(*walk.at) : 0.0f, 0.0f};
    walk.at += walk.step;
  }
}

template <class T>
__device__ __forceinline__ void store_tokens(Walk<T> walk, const float (&values)[kOwn]) {
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    if (walk.there(j)) *walk.at = from_float<T>(values[j]);
    walk.at += walk.step;
  }
}

// Asks for tokens, into the second cache.
template <class T>
__device__ __forceinline__ void prefetch(Walk<T> walk, const Transform& transform) {
  if (transform.channel() != 0) return;  // neighbours lie in the same line of the cache
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    if (walk.there(j)) ptx::prefetch_l2(walk.at);
    walk.at += walk.step;
  }
}

// x and what is before it.
template <class T>
__device__ __forceinline__ void load_inputs(const Call<T>& call, const Transform& transform, const Place& place,
                                            std::int64_t from, std::int64_t channel, float2 (&v)[kOwn]) {
  if (place.past == 0) return load_tokens(Walk<T>(call.x, transform, place, from, channel), v);
#pragma unroll
  for (int j = 0; j < kOwn; ++j) v[j] = {call.token(place, from + transform.token(j), channel), 0.0f};
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2)
    fused_forward_kernel(Call<T> call, Spectra filter, Lines<T> y, int chunks) {
  extern __shared__ __align__(16) unsigned char memory[];
  const Transform transform(memory);
  const Share share(call, transform, filter);
  flashgla::cuda::wait_for_previous();
  const float2* own = filter.at(0, 0, share.group);
  for (int n = share.chunk; n < call.sequences; n += chunks) {
    const Place place = call.place_of(n);
    if (!place.by_transforms()) continue;
    float2 v[kOwn];
    load_inputs(call, transform, place, 0, share.channel, v);
    if (n + chunks < call.sequences) {
      prefetch(Walk<T>(call.x, transform, call.place_of(n + chunks), 0, share.channel), transform);
    }
    transform.forward(v);
    transform.change_frequencies([&](int i, float2 value) { return product(value, own[i * kThreads]); });
    float values[kOwn];
    transform.back(values);
    if (share.there) store_tokens(Walk<T>(y, transform, place, 0, share.channel), values);
  }
}

// dfilter [chunks,rows,D].
template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    fused_backward_kernel(Call<T> call, Spectra filter, Lines<T> dy, Lines<T> dx, float* dfilter, int chunks) {
  extern __shared__ __align__(16) unsigned char memory[];
  const Transform transform(memory);
  const Share share(call, transform, filter);
  float2* tokens = reinterpret_cast<float2*>(memory + Transform::kBytes) + threadIdx.x;  // a thread's own
  flashgla::cuda::wait_for_previous();
  const float2* own = filter.at(0, 0, share.group);
  float2 sums[kOwn] = {};
  float values[kOwn];
  for (int n = share.chunk; n < call.sequences; n += chunks) {
    const Place place = call.place_of(n);
    if (!place.by_transforms()) continue;
    float2 v[kOwn];
    load_inputs(call, transform, place, 0, share.channel, v);
    prefetch(Walk<T>(dy, transform, place, 0, share.channel), transform);
    transform.forward(v);
    transform.frequencies([&](int i, float2 value) { tokens[i * kThreads] = value; });
    __syncthreads();
    load_tokens(Walk<T>(dy, transform, place, 0, share.channel), v);
    if (n + chunks < call.sequences) {
      prefetch(Walk<T>(call.x, transform, call.place_of(n + chunks), 0, share.channel), transform);
    }
    transform.forward(v);
    transform.change_frequencies([&](int i, float2 value) {
      sums[i] = sum(sums[i], product(value, conjugate(tokens[i * kThreads])));
      return product(value, conjugate(own[i * kThreads]));
    });
    transform.back(values);
    if (share.there) store_tokens(Walk<T>(dx, transform, place, 0, share.channel), values);
  }
  __syncthreads();
  transform.set_frequencies([&](int i) { return sums[i]; });
  transform.back(values);
  if (!share.there) return;
  float* to = dfilter + std::int64_t{share.chunk} * call.rows * call.channels + share.channel;
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    if (transform.token(j) < call.rows) to[transform.token(j) * call.channels] = values[j] * (1.0f / kPoints);
  }
  for (std::int64_t row = kPoints + transform.token(0); row < call.rows; row += kLanes) to[row * call.channels] = 0.0f;
}

}  // namespace flashgla::ops::long_convolution::cuda
