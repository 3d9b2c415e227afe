// Sequences of more than kPoints tokens, by blocks of so many: each block's spectrum, sums of products over blocks, and
// back. With f_k the filter's block k and g_k = f_k - i f_(k-1), whose second part is what block k - 1 reaches over
// into the next (transform.cuh), the outputs of block m are the real part of what comes back of sum_(a <= m) G_(m-a)
// X_a.
#pragma once

#include "flashgla/ops/long_convolution/cuda/transform.cuh"

namespace flashgla::ops::long_convolution::cuda {

constexpr int kProductThreads = 128;

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

// x and what is before it.
template <class T>
__device__ __forceinline__ void load_inputs(const Call<T>& call, const Transform& transform, const Place& place,
                                            std::int64_t from, std::int64_t channel, float2 (&v)[kOwn]) {
  if (place.past == 0) return load_tokens(Walk<T>(call.x, transform, place, from, channel), v);
#pragma unroll
  for (int j = 0; j < kOwn; ++j) v[j] = {call.token(place, from + transform.token(j), channel), 0.0f};
}

// Kernels that touch no token take a Call<float> of any dtype.

// Which channels of which block of which sequence a block of threads has.
struct Part {
  Share share;
  std::int64_t n, block;

  template <class T>
  __device__ __forceinline__ Part(const Call<T>& call, const Transform& transform, const Spectra& spectra)
      : share(call, transform, spectra), n(share.chunk / spectra.blocks), block(share.chunk - n * spectra.blocks) {}
};

__device__ __forceinline__ std::int64_t blocks_of(const Place& place) {
  return place.by_transforms() ? (place.past + place.length + kPoints - 1) / kPoints : 0;
}

// The filter's spectra G over kPoints, the skip in them.
__global__ void __launch_bounds__(kThreads) filter_spectra_kernel(Call<float> call, Spectra to) {
  extern __shared__ __align__(16) unsigned char memory[];
  const Transform transform(memory);
  const Part part(call, transform, to);
  flashgla::cuda::wait_for_previous();
  float2 v[kOwn];
  const auto filter = [&](std::int64_t row) {
    const float value = row >= 0 && row < call.rows ? call.filter[row * call.channels + part.share.channel] : 0.0f;
    return (row == 0 ? value + call.skip[part.share.channel] : value) * (1.0f / kPoints);
  };
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    const std::int64_t row = part.block * kPoints + transform.token(j);
    v[j] = {filter(row), -filter(row - kPoints)};
  }
  transform.forward(v);
  float2* own = to.at(part.n, part.block, part.share.group);
  transform.frequencies([&](int i, float2 value) { own[i * kThreads] = value; });
}

// Spectra of x, or with kGradients of dy.
template <class T, bool kGradients>
__global__ void __launch_bounds__(kThreads) spectra_kernel(Call<T> call, Lines<T> dy, Spectra to) {
  extern __shared__ __align__(16) unsigned char memory[];
  const Transform transform(memory);
  const Part part(call, transform, to);
  flashgla::cuda::wait_for_previous();
  const Place place = call.place_of(part.n);
  if (part.block >= blocks_of(place)) return;
  float2 v[kOwn];
  if (kGradients) {
    load_tokens(Walk<T>(dy, transform, place, part.block * kPoints, part.share.channel), v);
  } else {
    load_inputs(call, transform, place, part.block * kPoints, part.share.channel, v);
  }
  transform.forward(v);
  float2* own = to.at(part.n, part.block, part.share.group);
  transform.frequencies([&](int i, float2 value) { own[i * kThreads] = value; });
}

template <class T>
__global__ void __launch_bounds__(kThreads) tokens_kernel(Call<T> call, Spectra from, Lines<T> to) {
  extern __shared__ __align__(16) unsigned char memory[];
  const Transform transform(memory);
  const Part part(call, transform, from);
  flashgla::cuda::wait_for_previous();
  const Place place = call.place_of(part.n);
  if (part.block >= blocks_of(place)) return;
  const float2* own = from.at(part.n, part.block, part.share.group);
  transform.set_frequencies([&](int i) { return own[i * kThreads]; });
  float values[kOwn];
  transform.back(values);
  if (part.share.there) store_tokens(Walk<T>(to, transform, place, part.block * kPoints, part.share.channel), values);
}

// dfilter [rows,D].
__global__ void __launch_bounds__(kThreads) filter_gradient_kernel(Call<float> call, Spectra from, float* dfilter) {
  extern __shared__ __align__(16) unsigned char memory[];
  const Transform transform(memory);
  const Part part(call, transform, from);
  flashgla::cuda::wait_for_previous();
  const float2* own = from.at(part.n, part.block, part.share.group);
  transform.set_frequencies([&](int i) { return own[i * kThreads]; });
  float values[kOwn];
  transform.back(values);
  if (!part.share.there) return;
  float* to = dfilter + part.n * call.rows * call.channels + part.share.channel;
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    const std::int64_t row = part.block * kPoints + transform.token(j);
    if (row < call.rows) to[row * call.channels] = values[j] * (1.0f / kPoints);
  }
  if (part.block + 1 < from.blocks) return;
  for (std::int64_t row = from.blocks * kPoints + transform.token(0); row < call.rows; row += kLanes) {
    to[row * call.channels] = 0.0f;
  }
}

// A thread's frequency of a channel, in the order of a block's spectrum, of a sequence.
struct Frequency {
  std::int64_t n, place;

  __device__ __forceinline__ explicit Frequency(const Spectra& spectra) {
    const std::int64_t item = std::int64_t{blockIdx.x} * kProductThreads + threadIdx.x;
    n = item / spectra.step();
    place = item - n * spectra.step();
  }
  __device__ __forceinline__ float2* of(const Spectra& spectra, std::int64_t number) const {
    return spectra.data + number * spectra.blocks * spectra.step() + place;
  }
};

// Blocks [first, first + kTile) of a sequence's `count`, zeros behind them.
template <int kTile>
__device__ __forceinline__ void load_tile(const float2* from, std::int64_t step, std::int64_t first, std::int64_t count,
                                          float2 (&v)[kTile]) {
#pragma unroll
  for (int i = 0; i < kTile; ++i) v[i] = first + i < count ? from[(first + i) * step] : float2{0.0f, 0.0f};
}

// In place: block m becomes sum_(a <= m) G_(m-a) X_a; with kBack sum_(a >= m) conjugate(G_(a-m)) X_a.
template <int kTile, bool kBack>
__global__ void __launch_bounds__(kProductThreads) product_kernel(Call<float> call, Spectra filter, Spectra x) {
  flashgla::cuda::wait_for_previous();
  const Frequency at(x);
  if (at.n >= call.sequences) return;
  const std::int64_t count = blocks_of(call.place_of(at.n)), tiles = (count + kTile - 1) / kTile;
  const float2* g = at.of(filter, 0);
  float2* blocks = at.of(x, at.n);
  for (std::int64_t step = 0; step < tiles; ++step) {
    const std::int64_t to = kBack ? step : tiles - 1 - step;  // those that are done are no input of those to come
    float2 sums[kTile] = {};
    for (std::int64_t from = kBack ? to : 0; from < (kBack ? tiles : to + 1); ++from) {
      float2 v[kTile];
      load_tile(blocks, x.step(), from * kTile, count, v);
      const std::int64_t apart = (kBack ? from - to : to - from) * kTile;
#pragma unroll
      for (int beside = 1 - kTile; beside < kTile; ++beside) {
        if (apart + beside < 0 || apart + beside >= filter.blocks) continue;
        const float2 factor = g[(apart + beside) * filter.step()];
#pragma unroll
        for (int i = 0; i < kTile; ++i) {
          const int a = kBack ? i + beside : i - beside;
          if (a >= 0 && a < kTile) sums[i] = sum(sums[i], turned<kBack>(v[a], factor));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kTile; ++i) {
      if (to * kTile + i < count) blocks[(to * kTile + i) * x.step()] = sums[i];
    }
  }
}

// The filter's gradient: E_k + i E_(k+1), E_k = sum_a conjugate(X_a) dY_(a+k).
template <int kTile>
__global__ void __launch_bounds__(kProductThreads)
    filter_product_kernel(Call<float> call, Spectra x, Spectra dy, Spectra to) {
  flashgla::cuda::wait_for_previous();
  const Frequency at(to);
  if (at.n > 0) return;
  float2* out = at.of(to, at.n);
  float2 above{0.0f, 0.0f};  // E of the tile above's first
  for (std::int64_t tile = (to.blocks + kTile - 1) / kTile - 1; tile >= 0; --tile) {
    float2 sums[kTile] = {};
    for (std::int64_t n = 0; n < call.sequences; ++n) {
      const std::int64_t count = blocks_of(call.place_of(n)), tiles = (count + kTile - 1) / kTile;
      for (std::int64_t late = tile; late < tiles; ++late) {
        float2 w[kTile];
        load_tile(at.of(dy, n), dy.step(), late * kTile, count, w);
#pragma unroll
        for (int apart = 0; apart < 2; ++apart) {  // of dy and x: `tile` tiles, or one more
          const std::int64_t early = late - tile - apart;
          if (early < 0) continue;
          float2 v[kTile];
          load_tile(at.of(x, n), x.step(), early * kTile, count, v);
#pragma unroll
          for (int i = 0; i < kTile; ++i) {
#pragma unroll
            for (int a = 0; a < kTile; ++a) {
              const int k = i - a + apart * kTile;
              if (k >= 0 && k < kTile) sums[k] = sum(sums[k], product(w[i], conjugate(v[a])));
            }
          }
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kTile; ++k) {
      const float2 next = k + 1 < kTile ? sums[k + 1] : above;
      if (tile * kTile + k < to.blocks) {
        out[(tile * kTile + k) * to.step()] = {sums[k].x - next.y, sums[k].y + next.x};
      }
    }
    above = sums[0];
  }
}

}  // namespace flashgla::ops::long_convolution::cuda
