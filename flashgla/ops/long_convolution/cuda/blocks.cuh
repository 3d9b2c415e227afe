// Sequences of more than kPoints tokens, by blocks of so many: each block's spectrum, sums of products over blocks, and
// back. With F_k the spectrum of the filter's block k and G_k = F_k - i F_(k-1), whose second part is what block k - 1
// reaches over into the next (transform.cuh), the outputs of block m are the real part of what comes back of
// sum_(a <= m) G_(m-a) X_a.
//
// Pairs' spectra have scales, of each block and channel: a block's tokens come below 2^kTop by its largest one, a block
// of the filter below 1 by its magnitudes' sum. The products' sums bring them to a channel's largest, the filter's so
// far below it that sums over any blocks stay below 2^15.
#pragma once

#include "flashgla/ops/long_convolution/cuda/transform.cuh"

namespace flashgla::ops::long_convolution::cuda {

using flashgla::cuda::Vector;

constexpr int kProductThreads = 128;
constexpr int kBlockTop = 4;

// Spectra in memory as threads have them: [count,blocks,groups of channels,kOwn,kThreads].
template <class P>
struct Spectra {
  P* data;
  float2* scales;  // of Pairs: factors back, [count,blocks+1,groups,kChannels]; of products the last, for all blocks
  std::int64_t blocks, groups;
  std::int64_t first = 0;  // of the channels' groups

  static constexpr int kWide = Numbers<P>::kWide, kAcross = kChannels * kWide;  // channels of a number, of a group
  static constexpr std::int64_t kOfGroup = std::int64_t{kOwn} * kThreads;
  __host__ __device__ std::int64_t step() const { return groups * kOfGroup; }  // from block to block
  // A thread's first; kThreads lie between its next ones.
  __device__ __forceinline__ P* at(std::int64_t n, std::int64_t block, std::int64_t group) const {
    return data + ((n * blocks + block) * groups + group) * kOfGroup + threadIdx.x;
  }
  __device__ __forceinline__ float2& scale(std::int64_t n, std::int64_t block, std::int64_t number) const {
    return scales[(n * (blocks + 1) + block) * groups * kChannels + number];
  }
};

// Which channels of which block of which sequence a block of threads has: a group's, or the first of `each` groups'.
struct Part {
  std::int64_t n, block;
  int group, channel;

  template <class P>
  __device__ __forceinline__ Part(const Transform<P>& transform, const Spectra<P>& spectra, unsigned item,
                                  int each = 1) {
    const int groups = static_cast<int>(spectra.groups) / each, chunk = static_cast<int>(item) / groups;
    group = (static_cast<int>(item) - chunk * groups) * each;
    channel = (static_cast<int>(spectra.first) + group) * Spectra<P>::kAcross + transform.channel() * Spectra<P>::kWide;
    n = chunk / spectra.blocks;
    block = chunk - n * spectra.blocks;
  }
};

__device__ __forceinline__ std::int64_t blocks_of(const Place& place) {
  return place.by_transforms() ? (place.past + place.length + kPoints - 1) / kPoints : 0;
}

// A thread's rows of a tensor [rows,channels]: kLanes apart, from `first` on, which may be negative; kWide channels of
// each. Pointers walk, since products of strides would be kept, more of them than there are registers.
template <class T, int kWide>
struct Walk {
  T* at;
  std::int64_t step;
  int first, length;
  bool whole, last;  // channels in one piece; whether not all of them are there

  // Rows of `data`, the first of which is row `first` of `length`.
  __device__ __forceinline__ Walk(T* data, std::int64_t stride, int first, std::int64_t length, int channel,
                                  std::int64_t channels)
      : at(data + first * stride + channel),
        step(kLanes * stride),
        first(first),
        length(channel < channels ? static_cast<int>(length) : 0),
        last(channel + kWide > channels) {
    const auto strides = stride * static_cast<std::int64_t>(sizeof(T));
    whole = !last && ((static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(data + channel)) | strides) %
                      (kWide * static_cast<std::int64_t>(sizeof(T)))) == 0;
  }
  __device__ __forceinline__ bool there(int j) const {
    return static_cast<unsigned>(first + kLanes * j) < static_cast<unsigned>(length);
  }
};

// Of a sequence in a tensor, from index `from` on.
template <class P, class T>
__device__ __forceinline__ Walk<T, Numbers<P>::kWide> walk_of(const Lines<T>& lines, const Transform<P>& transform,
                                                              const Place& place, std::int64_t from, int channel,
                                                              std::int64_t channels) {
  T* data = lines.data + place.line * lines.line_stride + place.begin * lines.token_stride;
  return {data,    lines.token_stride, static_cast<int>(from - place.past) + transform.token(0), place.length, channel,
          channels};
}

// Values of a thread's rows; zeros where there are none.
template <class T, int kWide>
__device__ __forceinline__ void load_rows(Walk<T, kWide> walk, float (&values)[kOwn][kWide]) {
  using Element = std::remove_const_t<T>;
  if (walk.whole) {
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      const auto row = walk.there(j) ? Vector<Element, kWide>::load(walk.at) : Vector<Element, kWide>::zero();
      walk.at += walk.step;
#pragma unroll
      for (int c = 0; c < kWide; ++c) values[j][c] = row[c];
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
#pragma unroll
    for (int c = 0; c < kWide; ++c) {
      values[j][c] = walk.there(j) && (c == 0 || !walk.last) ? to_float(walk.at[c]) : 0.0f;
    }
    walk.at += walk.step;
  }
}

template <class T, int kWide>
__device__ __forceinline__ void store_rows(Walk<T, kWide> walk, const float (&values)[kOwn][kWide]) {
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    if (walk.there(j) && walk.whole) {
      Vector<T, kWide>::of(values[j]).store(walk.at);
    } else if (walk.there(j)) {
#pragma unroll
      for (int c = 0; c < kWide; ++c) {
        if (c == 0 || !walk.last) walk.at[c] = from_float<T>(values[j][c]);
      }
    }
    walk.at += walk.step;
  }
}

// A block's numbers of its values, times shift(j). Pairs are scaled, below 2^top by the sum of a channel's magnitudes
// (kSum) or by the largest, and `from` gets what takes it back; `room` is Transform's.
template <bool kSum>
__device__ __forceinline__ void scale_values(const float (&values)[kOwn][1], float* /*room*/, int /*top*/,
                                             float2 (&v)[kOwn], float2* /*from*/) {
#pragma unroll
  for (int j = 0; j < kOwn; ++j) v[j] = of_real(values[j][0], shift(j));
}
template <bool kSum>
__device__ __forceinline__ void scale_values(const float (&values)[kOwn][2], float* room, int top, Pair (&v)[kOwn],
                                             float2* from) {
  constexpr int kWarps = kThreads / 32;
  const auto combine = [](float a, float b) { return kSum ? a + b : fmaxf(a, b); };
  const int channel = static_cast<int>(threadIdx.x) % kChannels;
  float all[2];
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    float own = 0.0f;
#pragma unroll
    for (int j = 0; j < kOwn; ++j) own = combine(own, fabsf(values[j][c]));
#pragma unroll
    for (int apart = 16; apart >= kChannels; apart /= 2) {
      own = combine(own, __shfl_xor_sync(0xffffffffu, own, apart));
    }
    if (threadIdx.x % 32 < kChannels) room[(static_cast<int>(threadIdx.x) / 32 * kChannels + channel) * 2 + c] = own;
  }
  __syncthreads();
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    all[c] = room[channel * 2 + c];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) all[c] = combine(all[c], room[(w * kChannels + channel) * 2 + c]);
  }
  const Scale low = Scale::below(Scale::field_of(all[0]), top), high = Scale::below(Scale::field_of(all[1]), top);
  if (threadIdx.x < kChannels) *from = {low.from, high.from};
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    v[j] = of_real(__floats2half2_rn(values[j][0] * low.to, values[j][1] * high.to), shift(j));
  }
}

// A block's spectrum of its values.
template <bool kSum, class P>
__device__ __forceinline__ void make_spectrum(const Transform<P>& transform, float* room, int top,
                                              const float (&values)[kOwn][Spectra<P>::kWide], const Spectra<P>& to,
                                              const Part& part) {
  P v[kOwn];
  scale_values<kSum>(values, room, top, v, &to.scale(part.n, part.block, part.group * kChannels + transform.channel()));
  transform.forward(v);
  P* own = to.at(part.n, part.block, part.group);
  transform.frequencies([&](int i, P value) { own[i * kThreads] = value; });
}

// The filter's spectra F over kPoints, the skip in them; of Pairs kPoints times as much.
template <class P, class T>
__device__ __forceinline__ void make_filter_spectrum(const Call<T>& call, const Transform<P>& transform, float* room,
                                                     const Spectra<P>& to, const Part& part) {
  constexpr int kWide = Spectra<P>::kWide;
  const int first = static_cast<int>(part.block) * kPoints + transform.token(0);
  float values[kOwn][kWide];
  load_rows(Walk<const float, kWide>(call.filter, call.channels, first, call.rows, part.channel, call.channels),
            values);
#pragma unroll
  for (int c = 0; c < kWide; ++c) {
    if (first == 0 && part.channel + c < call.channels) values[0][c] += call.skip[part.channel + c];
    if constexpr (kWide == 1) {
#pragma unroll
      for (int j = 0; j < kOwn; ++j) values[j][c] *= 1.0f / kPoints;
    }
  }
  make_spectrum<true>(transform, room, 0, values, to, part);
}

// Spectra of the filter, x and dy, of each as many as there are blocks for.
template <class P, class T>
__global__ void __launch_bounds__(kThreads, 2)
    spectra_kernel(Call<T> call, Lines<T> dy, Spectra<P> filter, Spectra<P> x, Spectra<P> gradients, unsigned of_filter,
                   unsigned of_x) {
  extern __shared__ __align__(16) unsigned char memory[];
  const Transform<P> transform(memory);
  float* room = Transform<P>::room(memory);
  flashgla::cuda::wait_for_previous();
  flashgla::cuda::release_next();
  if (blockIdx.x < of_filter) {
    return make_filter_spectrum(call, transform, room, filter, Part(transform, filter, blockIdx.x));
  }
  const unsigned item = blockIdx.x - of_filter;
  const bool of_gradients = item >= of_x;
  const Spectra<P> to = of_gradients ? gradients : x;
  const Part part(transform, to, of_gradients ? item - of_x : item);
  const Place place = call.place_of(part.n);
  if (part.block >= blocks_of(place)) return;
  constexpr int kWide = Spectra<P>::kWide;
  const std::int64_t from = part.block * kPoints;
  float values[kOwn][kWide];
  if (of_gradients || place.past == 0) {
    load_rows(walk_of(of_gradients ? dy : call.x, transform, place, from, part.channel, call.channels), values);
  } else {  // by way of shared memory, which keeps this out of registers
    float* own = reinterpret_cast<float*>(Transform<P>::points(memory)) + threadIdx.x;
#pragma unroll 1
    for (int i = 0; i < kOwn * kWide; ++i) {
      const int d = part.channel + i % kWide;
      own[i * kThreads] = d < call.channels ? call.token(place, from + transform.token(i / kWide), d) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kOwn * kWide; ++i) values[i / kWide][i % kWide] = own[i * kThreads];
    __syncthreads();
  }
  make_spectrum<false>(transform, room, kBlockTop, values, to, part);
}

__device__ __forceinline__ void write_values(const float (&values)[kOwn], float2 by, float (&to)[kOwn][1]) {
#pragma unroll
  for (int j = 0; j < kOwn; ++j) to[j][0] = values[j] * by.x;
}
__device__ __forceinline__ void write_values(const __half2 (&values)[kOwn], float2 by, float (&to)[kOwn][2]) {
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    const float2 both = __half22float2(values[j]);
    to[j][0] = both.x * by.x;
    to[j][1] = both.y * by.y;
  }
}

// Kernels of outputs take kEach groups of channels at a time: of two, neighbours, f32 rows go out together, 32 bytes in
// one piece, since a multiprocessor takes some 3 clocks for a piece, be it of 16 bytes or 32. That is for gradients of
// calls all of whose channels are such pairs.
template <class P, int kEach>
constexpr int kRowsBytes = Transform<P>::kBytes + (kEach > 1 ? kOwn * kThreads * static_cast<int>(sizeof(float)) : 0);

// Rows of two groups, `walk` of the first, whose values are in shared memory. Of neighbouring lanes' rows each lane
// gets one group's values, so that both write one row at once.
__device__ __forceinline__ void store_rows_together(const Walk<float, 1>& walk, const float* first,
                                                    const float (&second)[kOwn][1]) {
  const int odd = static_cast<int>(threadIdx.x) / kChannels % 2;
  const std::int64_t stride = walk.step / kLanes;
  float* to = walk.at + odd * (kChannels - stride);
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    const float low = first[j * kThreads], high = second[j][0];
    const float other = __shfl_xor_sync(0xffffffffu, odd ? low : high, kChannels);
    const int row = walk.first - odd + kLanes * j;
    if (static_cast<unsigned>(row) < static_cast<unsigned>(walk.length)) *to = odd ? other : low;
    if (static_cast<unsigned>(row + 1) < static_cast<unsigned>(walk.length)) to[stride] = odd ? high : other;
    to += walk.step;
  }
}

// Takes kEach groups' spectra back to rows, those of make_walk(), times `by`.
template <int kEach, class P, class MakeWalk>
__device__ __forceinline__ void store_groups(const Transform<P>& transform, unsigned char* memory,
                                             const Spectra<P>& from, const Part& part, const MakeWalk& make_walk,
                                             float2 by) {
  float* held = reinterpret_cast<float*>(memory + Transform<P>::kBytes) + threadIdx.x;
  const P* own = from.at(part.n, part.block, part.group);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (i > 0) __syncthreads();
    P v[kOwn];
#pragma unroll
    for (int j = 0; j < kOwn; ++j) v[j] = own[i * Spectra<P>::kOfGroup + j * kThreads];
    transform.set_frequencies([&](int j) { return v[j]; });
    typename Numbers<P>::Real values[kOwn];
    transform.back(values);
    float written[kOwn][Spectra<P>::kWide];
    write_values(values, by, written);
    if constexpr (kEach == 1) {
      store_rows(make_walk(), written);
    } else if (i == 0) {
#pragma unroll
      for (int j = 0; j < kOwn; ++j) held[j * kThreads] = written[j][0];
    } else {
      store_rows_together(make_walk(), held, written);
    }
  }
}

template <class P, class T, int kEach>
__global__ void __launch_bounds__(kThreads, 2) tokens_kernel(Call<T> call, Spectra<P> from, Lines<T> to) {
  extern __shared__ __align__(16) unsigned char memory[];
  const Transform<P> transform(memory);
  const Part part(transform, from, blockIdx.x, kEach);
  flashgla::cuda::wait_for_previous();
  flashgla::cuda::release_next();
  const Place place = call.place_of(part.n);
  if (part.block >= blocks_of(place)) return;
  float2 by{1.0f, 1.0f};
  if (Spectra<P>::kWide > 1) by = from.scale(part.n, from.blocks, part.group * kChannels + transform.channel());
  store_groups<kEach>(
      transform, memory, from, part,
      [&] { return walk_of(to, transform, place, part.block * kPoints, part.channel, call.channels); }, by);
}

// dfilter [rows,D].
template <int kEach>
__global__ void __launch_bounds__(kThreads, 2)
    filter_gradient_kernel(Call<float> call, Spectra<float2> from, float* dfilter) {
  extern __shared__ __align__(16) unsigned char memory[];
  const Transform<float2> transform(memory);
  const Part part(transform, from, blockIdx.x, kEach);
  flashgla::cuda::wait_for_previous();
  flashgla::cuda::release_next();
  const int first = static_cast<int>(part.block) * kPoints + transform.token(0);
  store_groups<kEach>(
      transform, memory, from, part,
      [&] { return Walk<float, 1>(dfilter, call.channels, first, call.rows, part.channel, call.channels); },
      {1.0f / kPoints, 1.0f / kPoints});
  if (part.block + 1 < from.blocks) return;
  for (int i = 0, channel = part.channel; i < kEach && channel < call.channels; ++i, channel += kChannels) {
    for (std::int64_t row = from.blocks * kPoints + transform.token(0); row < call.rows; row += kLanes) {
      dfilter[row * call.channels + channel] = 0.0f;
    }
  }
}

// Kernels that touch no token take a Call<float> of any dtype.

// A thread's frequency of a channel or two, in the order of a block's spectrum, of a sequence.
struct Frequency {
  std::int64_t n, place;

  template <class P>
  __device__ __forceinline__ explicit Frequency(const Spectra<P>& spectra) {
    const std::int64_t item = std::int64_t{blockIdx.x} * kProductThreads + threadIdx.x;
    n = item / spectra.step();
    place = item - n * spectra.step();
  }
  template <class P>
  __device__ __forceinline__ P* of(const Spectra<P>& spectra, std::int64_t number) const {
    return spectra.data + number * spectra.blocks * spectra.step() + place;
  }
  // Of the spectra's group.
  __device__ __forceinline__ bool is_first() const { return place % Spectra<float2>::kOfGroup < kChannels; }
  __device__ __forceinline__ std::int64_t number() const {
    return place / Spectra<float2>::kOfGroup * kChannels + place % kChannels;
  }
};

// A frequency of a sequence's or filter's blocks below `count`. Pairs come to one scale, the filter's 2^below times
// less; `scales` [count,kChannels] in shared memory, which a block's threads, of one sequence and group, fill together.
template <class P>
struct Row {
  const P* from;
  std::int64_t step;
  int count;

  __device__ __forceinline__ Row(const Spectra<P>& spectra, const Frequency& at, std::int64_t n, int count,
                                 float2* /*scales*/ = nullptr)
      : from(at.of(spectra, n)), step(spectra.step()), count(count) {}
  __device__ __forceinline__ void find_scale(int /*below*/) {}
  // Blocks [first, first + N); zeros where there are none.
  template <int N>
  __device__ __forceinline__ void load(int first, P (&to)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int block = first + i;
      to[i] = block >= 0 && block < count ? from[block * step] : P{};
    }
  }
};
template <>
struct Row<Pair> {
  const Pair* from;
  const float2* scales;
  std::int64_t step;
  int count;
  float2 largest, inverse;  // factors back; their inverses, times 2^-below

  __device__ __forceinline__ Row(const Spectra<Pair>& spectra, const Frequency& at, std::int64_t n, int count,
                                 float2* scales)
      : from(at.of(spectra, n)), scales(scales + at.number() % kChannels), step(spectra.step()), count(count) {
    const std::int64_t first = at.number() / kChannels * kChannels;
    for (int item = static_cast<int>(threadIdx.x); item < count * kChannels; item += kProductThreads) {
      scales[item] = spectra.scale(n, item / kChannels, first + item % kChannels);
    }
  }
  // All threads must have met behind all constructors.
  __device__ __forceinline__ void find_scale(int below) {
    largest = {0.0f, 0.0f};
#pragma unroll 4
    for (int block = 0; block < count; ++block) {
      const float2 scale = scales[block * kChannels];
      largest = {fmaxf(largest.x, scale.x), fmaxf(largest.y, scale.y)};
    }
    const float less = __uint_as_float(static_cast<std::uint32_t>(127 - below) << 23);
    inverse = {__uint_as_float(0x7f000000u - __float_as_uint(largest.x)) * less,
               __uint_as_float(0x7f000000u - __float_as_uint(largest.y)) * less};
  }
  template <int N>
  __device__ __forceinline__ void load(int first, Pair (&to)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {  // without branches, which would make loads wait for each other
      const int block = min(max(first + i, 0), count - 1);
      to[i] = from[block * step];
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int block = first + i;
      const bool there = block >= 0 && block < count;
      const float2 scale = scales[(there ? block : 0) * kChannels];
      const __half2 by = there ? __floats2half2_rn(scale.x * inverse.x, scale.y * inverse.y) : __half2{};
      to[i] = {__hmul2(to[i].x, by), __hmul2(to[i].y, by)};
    }
  }
};

// A sequence's rows of a frequency. What takes products back, the first threads of a group leave behind.
template <class P>
struct Products {
  Row<P> x, filter;

  // `memory`: shared, 2 kChannels of float2 for each of the call's blocks.
  __device__ __forceinline__ Products(const Spectra<P>& filters, const Spectra<P>& spectra, const Frequency& at,
                                      int count, float2* memory)
      : x(spectra, at, at.n, count, memory),
        filter(filters, at, 0, min(count, static_cast<int>(filters.blocks)), memory + spectra.blocks * kChannels) {
    if constexpr (Spectra<P>::kWide > 1) {
      __syncthreads();
      const int below = 33 - __clz(filter.count - 1);  // sums of two spectra a block, each below 1, stay below 2^this
      x.find_scale(0);
      filter.find_scale(below);
      if (!at.is_first()) return;
      const float back = __uint_as_float(static_cast<std::uint32_t>(127 + below) << 23) * (1.0f / kPoints);
      spectra.scale(at.n, spectra.blocks, at.number()) = {x.largest.x * (filter.largest.x * back),
                                                          x.largest.y * (filter.largest.y * back)};
    }
  }
  // G of [first, first + N).
  template <int N>
  __device__ __forceinline__ void load_filter(int first, P (&to)[N]) const {
    P before[1] = {};
    if (first > 0) filter.load(first - 1, before);
    filter.load(first, to);
#pragma unroll
    for (int k = N - 1; k > 0; --k) to[k] = difference_turned(to[k], to[k - 1]);
    to[0] = difference_turned(to[0], before[0]);
  }
};
// Bytes of it for a call of so many blocks.
template <class P>
constexpr int products_bytes(std::int64_t blocks) {
  return Spectra<P>::kWide == 1 ? 0 : static_cast<int>(blocks) * 2 * kChannels * static_cast<int>(sizeof(float2));
}

// In place: block m becomes sum_(a <= m) G_(m-a) X_a; with kBack sum_(a >= m) conjugate(G_(a-m)) X_a. Of at most kMost
// blocks.
template <class P, int kMost, bool kBack>
__global__ void __launch_bounds__(kProductThreads, 3)
    product_kernel(Call<float> call, Spectra<P> filters, Spectra<P> spectra) {
  extern __shared__ float2 scales[];
  flashgla::cuda::wait_for_previous();
  const Frequency at(spectra);
  if (at.n >= call.sequences) return;
  const int count = static_cast<int>(blocks_of(call.place_of(at.n)));
  if (count == 0) return;
  flashgla::cuda::release_next();
  const Products<P> products(filters, spectra, at, count, scales);
  P x[kMost], g[kMost];
  products.x.load(0, x);
  products.load_filter(0, g);
  kBack ? correlate(g, x, count) : convolve(g, x, count);
  P* to = at.of(spectra, at.n);
#pragma unroll
  for (int m = 0; m < kMost; ++m) {
    if (m < count) to[m * spectra.step()] = x[m];
  }
}

// The same of any blocks, kTile at a time.
template <class P, bool kBack>
__global__ void __launch_bounds__(kProductThreads, 4)
    tile_product_kernel(Call<float> call, Spectra<P> filters, Spectra<P> spectra) {
  extern __shared__ float2 scales[];
  constexpr int kTile = 8;
  flashgla::cuda::wait_for_previous();
  const Frequency at(spectra);
  if (at.n >= call.sequences) return;
  const int count = static_cast<int>(blocks_of(call.place_of(at.n))), tiles = (count + kTile - 1) / kTile;
  if (count == 0) return;
  const Products<P> products(filters, spectra, at, count, scales);
  P* blocks = at.of(spectra, at.n);
  for (int step = 0; step < tiles; ++step) {
    const int to = kBack ? step : tiles - 1 - step;  // those that are done are no input of those to come
    P sums[kTile] = {};
    for (int from = kBack ? to : 0; from < (kBack ? tiles : to + 1); ++from) {
      P x[kTile];
      products.x.load(from * kTile, x);
      // Of pairs of blocks as far apart as the tiles, or farther, or with kNearer nearer.
      const auto add = [&](int first, auto nearer) {
        constexpr bool kNearer = decltype(nearer)::value;
        P g[kTile];
        products.load_filter(first, g);
#pragma unroll
        for (int i = 0; i < kTile; ++i) {
#pragma unroll
          for (int a = 0; a < kTile; ++a) {
            const int far = kBack ? a - i : i - a;
            if ((far < 0) != kNearer) continue;
            const P factor = g[kNearer ? far + kTile : far];
            sums[i] = add_product(sums[i], kBack ? conjugate(factor) : factor, x[a]);
          }
        }
      };
      const int apart = (kBack ? from - to : to - from) * kTile;
      add(apart, std::false_type());
      if (apart > 0) add(apart - kTile, std::true_type());
    }
#pragma unroll
    for (int i = 0; i < kTile; ++i) {
      if (to * kTile + i < count) blocks[(to * kTile + i) * spectra.step()] = sums[i];
    }
  }
}

// The filter's gradient: E_k + i E_(k+1), E_k = sum_a conjugate(X_a) dY_(a+k).
template <int kTile>
__global__ void __launch_bounds__(kProductThreads, 4)
    filter_product_kernel(Call<float> call, Spectra<float2> x, Spectra<float2> dy, Spectra<float2> to) {
  flashgla::cuda::wait_for_previous();
  const Frequency at(to);
  if (at.n > 0) return;
  float2* out = at.of(to, at.n);
  float2 above{0.0f, 0.0f};  // E of the tile above's first
  for (int tile = static_cast<int>(to.blocks + kTile - 1) / kTile - 1; tile >= 0; --tile) {
    float2 sums[kTile] = {};
    for (std::int64_t n = 0; n < call.sequences; ++n) {
      const int count = static_cast<int>(blocks_of(call.place_of(n))), tiles = (count + kTile - 1) / kTile;
      const Row<float2> early_row(x, at, n, count), late_row(dy, at, n, count);
      for (int late = tile; late < tiles; ++late) {
        float2 w[kTile];
        late_row.load(late * kTile, w);
#pragma unroll
        for (int apart = 0; apart < 2; ++apart) {  // of dy and x: `tile` tiles, or one more
          const int early = late - tile - apart;
          if (early < 0) continue;
          float2 v[kTile];
          early_row.load(early * kTile, v);
#pragma unroll
          for (int i = 0; i < kTile; ++i) {
#pragma unroll
            for (int a = 0; a < kTile; ++a) {
              const int k = i - a + apart * kTile;
              if (k >= 0 && k < kTile) sums[k] = add_product(sums[k], conjugate(v[a]), w[i]);
            }
          }
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kTile; ++k) {
      const float2 next = k + 1 < kTile ? sums[k + 1] : above;
      if (tile * kTile + k < to.blocks) out[(tile * kTile + k) * to.step()] = sum_turned(sums[k], next);
    }
    above = sums[0];
  }
}

}  // namespace flashgla::ops::long_convolution::cuda
