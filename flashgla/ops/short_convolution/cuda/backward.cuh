// A thread walks through a chunk of time with some neighbouring channels, whose last inputs and their gradients it
// holds in registers; tokens come through shared memory.
#pragma once

#include "flashgla/ops/cuda/copy_ahead.cuh"
#include "flashgla/ops/cuda/division.cuh"
#include "flashgla/ops/cuda/partial_sums.cuh"
#include "flashgla/ops/short_convolution/cuda/call.cuh"

namespace flashgla::ops::short_convolution::cuda {

constexpr int kDown = 4;  // of a block along time
constexpr int kThreads = kAcross * kDown;
// Channels of a thread, where their number and addresses are multiples of it: 8 bytes.
template <class T>
constexpr int kBackwardElements = 8 / static_cast<int>(sizeof(T));
constexpr int kChunk = 128;   // tokens of a thread: as many as give all of a large problem's blocks room at once
constexpr int kTogether = 4;  // tokens that are copied as one group
constexpr int kGroups = 4;    // that a thread has room for
constexpr int kAhead = (kGroups - 1) * kTogether;  // tokens whose copies are under way while one is worked on
constexpr int kEarly = 16;  // tokens of a thread that go to the cache while the kernel before this one ends

// A thread's places for tokens on their way.
template <int N, class T>
struct Ring {
  using Values = Vector<T, N>;
  // Between a thread's x and its dy, between tokens; of all.
  static constexpr int kTensor = kThreads * Values::kBytes, kToken = 2 * kTensor, kBytes = kGroups * kTogether * kToken;
  static_assert((kBytes & (kBytes - 1)) == 0);
  std::uint32_t own;  // the thread's first place

  __device__ __forceinline__ explicit Ring(unsigned char* shared)  // kBytes, at a multiple of 16
      : own(ptx::shared_address(shared) + threadIdx.x * Values::kBytes) {}
  // Where token i of the walk is, behind `own`.
  static __device__ __forceinline__ std::uint32_t place_of(int i) {
    return static_cast<std::uint32_t>(i) * kToken % kBytes;
  }
  __device__ __forceinline__ void bring(std::uint32_t place, const T* x, const T* dy) const {
    ops::cuda::begin_copy<N>(own + place, x);
    ops::cuda::begin_copy<N>(own + place + kTensor, dy);
  }
  __device__ __forceinline__ Values x(std::uint32_t place) const { return ops::cuda::copied<N, T>(own + place); }
  __device__ __forceinline__ Values dy(std::uint32_t place) const {
    return ops::cuda::copied<N, T>(own + place + kTensor);
  }
};

// A thread's chunk of a line: `tokens` of it from begin() on.
struct Walk {
  std::uint32_t line, piece;
  int tokens;

  __device__ __forceinline__ Walk(const Call& call, std::uint32_t of_line, std::uint32_t of_piece)
      : line(of_line), piece(of_piece) {
    const std::int64_t left = call.length - begin();
    tokens = static_cast<int>(left < kChunk ? left : kChunk);
  }
  __device__ __forceinline__ std::int64_t begin() const { return std::int64_t{piece} * kChunk; }
  static constexpr std::int64_t kFarBehind = 2 * kChunk;
  // Which of the walk's tokens t is; -1 where it is before them, one that it does not come to where far behind.
  __device__ __forceinline__ int place_of(std::int64_t t) const {
    const std::int64_t i = t - begin();
    return static_cast<int>(i < -1 ? -1 : i < kFarBehind ? i : kFarBehind);
  }
};

template <class T>
struct Gradients {
  Lines<T> x, dy, dx;
  const float* d_final_state;                // null: zero
  float* d_initial_state;                    // null: not wanted
  std::int64_t x_bytes, dy_bytes, dx_bytes;  // from a token to the next
};

// Asks for a walk's first tokens, each line of memory by one thread.
template <int N, class T>
__device__ __forceinline__ void ask_early(const Gradients<T>& t, const Walk& walk, std::int64_t d) {
  constexpr int kThreadsOfLine = 128 / Vector<T, N>::kBytes;
  if (threadIdx.x % kThreadsOfLine != 0) return;
  const T *from_x = t.x.at(walk.line, walk.begin(), d), *from_dy = t.dy.at(walk.line, walk.begin(), d);
#pragma unroll 1
  for (int i = 0; i < kEarly && i < walk.tokens; ++i) {
    ptx::prefetch_l2(from_x);
    ptx::prefetch_l2(from_dy);
    from_x += t.x.token_stride;
    from_dy += t.dy.token_stride;
  }
}

// What a thread holds of its channels. Token i of the walk is at slot i % kSlots and those before it at the slots
// before, so that none moves; a token that comes alone takes the last slot, and the others move up.
constexpr int kSlots = kTogether;
constexpr int slot_of(int i) { return (i + kSlots) % kSlots; }

// Sums of a channel: of its weights, and of its bias.
template <int W, bool kBias>
constexpr int kSumsOf = W + (kBias ? 1 : 0);

template <int W, int N, bool kSilu, bool kBias>
struct Channels {
  static_assert(kSlots >= W);
  Filter<W, N, kBias> filter;
  float x[kSlots][N], dz[kSlots][N] = {};

  // The inputs before a sequence's token that comes next, and alone.
  __device__ __forceinline__ void begin(const float (&before)[W - 1][N]) {
#pragma unroll
    for (int j = 0; j < W - 1; ++j) {
#pragma unroll
      for (int c = 0; c < N; ++c) x[kSlots - (W - 1) + j][c] = before[j][c];
    }
  }

  __device__ __forceinline__ void move_up() {
#pragma unroll
    for (int j = 0; j + 1 < kSlots; ++j) {
#pragma unroll
      for (int c = 0; c < N; ++c) x[j][c] = x[j + 1][c], dz[j][c] = dz[j + 1][c];
    }
  }

  // Takes the token of slot kAt.
  template <int kAt, class Values>
  __device__ __forceinline__ void take(const Values& of_x, const Values& dy) {
#pragma unroll
    for (int c = 0; c < N; ++c) {
      x[kAt][c] = of_x[c];
      float z = fmaf(filter.weight[W - 1][c], x[kAt][c], filter.bias[c]);
#pragma unroll
      for (int j = 0; j < W - 1; ++j) z = fmaf(filter.weight[j][c], x[slot_of(kAt - (W - 1) + j)][c], z);
      dz[kAt][c] = kSilu ? scaled_gradient(z, dy[c]) : dy[c];
    }
  }

  // The bias's sums are behind the weights'.
  template <int kAt>
  __device__ __forceinline__ void add_to(float (&dweight)[kSumsOf<W, kBias>][N]) const {
#pragma unroll
    for (int j = 0; j < W; ++j) {
#pragma unroll
      for (int c = 0; c < N; ++c) {
        dweight[j][c] = fmaf(dz[kAt][c], x[slot_of(kAt - (W - 1) + j)][c], dweight[j][c]);
      }
    }
    if constexpr (kBias) {
#pragma unroll
      for (int c = 0; c < N; ++c) dweight[W][c] += dz[kAt][c];
    }
  }

  // dx of the token kBack before that of slot kAt, as far as tokens up to that one add to it: W-1 before, all of it.
  template <int kBack, int kAt>
  __device__ __forceinline__ void gradient(float (&dx)[N]) const {
#pragma unroll
    for (int c = 0; c < N; ++c) {
      dx[c] = filter.weight[W - 1][c] * dz[slot_of(kAt - kBack)][c];
#pragma unroll
      for (int k = 1; k <= kBack; ++k) {
        dx[c] = fmaf(filter.weight[W - 1 - k][c], dz[slot_of(kAt - kBack + k)][c], dx[c]);
      }
    }
  }
};

// Calls body(integral_constant) of each number below kCount.
template <class Body, int... kNumbers>
__device__ __forceinline__ void for_numbers(const Body& body, std::integer_sequence<int, kNumbers...>) {
  (body(std::integral_constant<int, kNumbers>()), ...);
}
template <int kCount, class Body>
__device__ __forceinline__ void for_each_number(const Body& body) {
  for_numbers(body, std::make_integer_sequence<int, kCount>());
}

// Writes dx of a sequence's last W-1 tokens; the last one came alone.
template <int W, int N, bool kSilu, bool kBias, class T>
__device__ __forceinline__ void finish_sequence(const Call& call, const Gradients<T>& t, const Walk& walk,
                                                const Place& place, std::int64_t d,
                                                const Channels<W, N, kSilu, kBias>& channels) {
  for_each_number<W - 1>([&](auto j) {
    const std::int64_t token = place.end - (W - 1) + j.value;
    if (token < place.begin || token < walk.begin() || token >= walk.begin() + walk.tokens) return;
    float dx[N];
    channels.template gradient<W - 2 - j.value, kSlots - 1>(dx);
    if (t.d_final_state) {
#pragma unroll
      for (int c = 0; c < N; ++c) dx[c] += t.d_final_state[state_at<W>(call, place.n, d + c, j.value)];
    }
    Vector<T, N>::of(dx).store(t.dx.at(walk.line, token, d));
  });
}

// The gradient of a channel's initial state.
template <int W, class T>
__device__ __forceinline__ void initial_state_gradient(const Call& call, const Gradients<T>& t, const Place& place,
                                                       std::int64_t line, std::int64_t d) {
  const std::int64_t length = place.end - place.begin;
  float dz[W - 1];
#pragma unroll
  for (int s = 0; s < W - 1; ++s) {
    dz[s] = 0.0f;
    if (s >= length) continue;
    float z = call.bias_at(d);
#pragma unroll
    for (int j = 0; j < W; ++j) {
      z += call.weight_at(d * W + j) * extended<W>(call, t.x, place, line, d, s + j);
    }
    const float dy = flashgla::cuda::to_float(*t.dy.at(line, place.begin + s, d));
    dz[s] = call.silu ? dy * ops::cuda::silu_slope(z, ops::cuda::sigmoid(z)) : dy;
  }
#pragma unroll
  for (int p = 0; p < W - 1; ++p) {
    float total = 0.0f;
#pragma unroll
    for (int j = 0; j <= p; ++j) total += call.weight_at(d * W + j) * dz[p - j];
    if (p >= length && t.d_final_state) {
      total += t.d_final_state[state_at<W>(call, place.n, d, static_cast<int>(p - length))];
    }
    t.d_initial_state[state_at<W>(call, place.n, d, p)] = total;
  }
}

// dx of a chunk's channels from d on, and what it adds to dweight and dbias, but for the filter's factor. Tokens are
// worked on kTogether at a time where no sequence begins or ends among them, most of them without a test, and else one
// by one.
template <int W, int N, bool kSilu, bool kBias, class T>
__device__ __forceinline__ void walk_backward(const Call& call, const Gradients<T>& t, const Walk& walk, std::int64_t d,
                                              unsigned char* shared, float (&dweight)[kSumsOf<W, kBias>][N]) {
  // Tokens of the chunk, and the W-1 behind it, as far as they are of the line.
  const std::int64_t left = call.length - walk.begin();
  const int count = static_cast<int>(walk.tokens + W - 1 < left ? walk.tokens + W - 1 : left);
  const T *from_x = t.x.at(walk.line, walk.begin(), d), *from_dy = t.dy.at(walk.line, walk.begin(), d);
  T* to = t.dx.at(walk.line, walk.begin() - (W - 1), d);  // of token i - (W-1), which may not be there
  const Ring<N, T> ring(shared);
  const auto bring = [&](std::uint32_t place) {
    ring.bring(place, from_x, from_dy);
    from_x = ops::cuda::bytes_behind(from_x, t.x_bytes);
    from_dy = ops::cuda::bytes_behind(from_dy, t.dy_bytes);
  };
#pragma unroll 1
  for (int i = 0; i < kAhead; ++i) {
    if (i < count) bring(ring.place_of(i));
    if (i % kTogether == kTogether - 1) ops::cuda::end_group();
  }
  Channels<W, N, kSilu, kBias> channels{Filter<W, N, kBias>(call, d)};  // while tokens are on their way
  int begins, next;                                                     // of the sequence that the tokens are of
  const auto enter = [&](int i) {
    const Place place = ops::cuda::place_at(call, walk.line, walk.begin() + i);
    begins = walk.place_of(place.begin), next = walk.place_of(place.end);
    float before[W - 1][N];
    inputs_before<W, N>(call, t.x, walk.line, place, walk.begin() + i, d, before);
    channels.begin(before);
  };
  const auto leave = [&](int i) {  // behind token i - 1
    const Place place = ops::cuda::place_at(call, walk.line, walk.begin() + i - 1);
    finish_sequence<W, N>(call, t, walk, place, d, channels);
  };
  enter(0);
  int i = 0;
  // Takes token i + k at slot kAt. kTested: dx of the token W-1 before it may be none of the chunk, or not complete.
  const auto take = [&](auto at, auto tested, int k, std::uint32_t place, bool of_chunk) {
    constexpr int kAt = decltype(at)::value;
    channels.template take<kAt>(ring.x(place), ring.dy(place));
    if (of_chunk) channels.template add_to<kAt>(dweight);
    const int completed = i + k - (W - 1);
    if (!decltype(tested)::value || (completed >= 0 && completed >= begins && completed < walk.tokens)) {
      float dx[N];
      channels.template gradient<W - 1, kAt>(dx);
      Vector<T, N>::of(dx).store(ops::cuda::bytes_behind(to, k * t.dx_bytes));
    }
  };
  const auto go_on = [&](int tokens) {
    i += tokens;
    to = ops::cuda::bytes_behind(to, tokens * t.dx_bytes);
  };
  const auto group = [&](auto tested) {
    const std::uint32_t ahead = ring.place_of(i + kAhead);
    if (i + kAhead + kTogether <= count) {
      for_each_number<kTogether>([&](auto k) { bring(ahead + k.value * ring.kToken); });
    } else {
#pragma unroll 1
      for (int k = 0; i + kAhead + k < count; ++k) bring(ahead + k * ring.kToken);
    }
    ops::cuda::end_group();
    ops::cuda::wait_for_groups_before<kGroups - 1>();
    const std::uint32_t place = ring.place_of(i);
    const bool of_chunk = !decltype(tested)::value || i < walk.tokens;
    for_each_number<kTogether>([&](auto k) { take(k, tested, k.value, place + k.value * ring.kToken, of_chunk); });
    go_on(kTogether);
  };
  while (i < count) {
    if (i % kTogether == 0) {
      const int last = min(next, walk.tokens) - kTogether;
      if (i >= W - 1 && begins <= i - (W - 1)) {
#pragma unroll 1
        while (i <= last) group(std::false_type());
      }
      // Behind the chunk: what comes after the W-1, and is not there, adds to nothing that is written.
      if (i <= last || (i == walk.tokens && i + W - 1 <= min(next, count))) {
        group(std::true_type());
        continue;
      }
    }
    if (i == next) {
      leave(i);
      if (i >= walk.tokens) break;
      enter(i);
    }
    if (i + kAhead < count) bring(ring.place_of(i + kAhead));
    if (i % kTogether == kTogether - 1) ops::cuda::end_group();
    ops::cuda::wait_for_groups_before<kGroups - 2>();
    channels.move_up();
    take(std::integral_constant<int, kSlots - 1>(), std::true_type(), 0, ring.place_of(i), i < walk.tokens);
    go_on(1);
  }
  if (i == count && next == count) leave(count);
  ops::cuda::wait_for_groups_before<0>();  // nothing may come after the block's end
}

template <int W, int N, class T, bool kBias>
constexpr int kBackwardShared = std::max(Ring<N, T>::kBytes,
                                         kSumsOf<W, kBias>* N* kThreads* static_cast<int>(sizeof(float)));

// Writes what a block adds to kSums sums of each channel: those over its kDown chunks, of which each of a channel's
// kDown threads adds up and writes a part, to `to` on. `there`: whether the channels are; `shared`: kSums N floats a
// thread.
template <int kSums, int N>
__device__ __forceinline__ void write_sums(const Call& call, const float (&sums)[kSums][N], bool there, float* shared,
                                           float* to) {
#pragma unroll
  for (int j = 0; j < kSums; ++j) {
#pragma unroll
    for (int i = 0; i < N; ++i) shared[(i * kSums + j) * kThreads + threadIdx.x] = sums[j][i];
  }
  __syncthreads();
  if (!there) return;
  constexpr int kEach = (N * kSums + kDown - 1) / kDown;
  const float factor = call.silu ? -kLog2OfE : 1.0f;
  const int across = threadIdx.x % kAcross, first = static_cast<int>(threadIdx.x / kAcross) * kEach;
  float totals[kEach];
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    float total = 0.0f;
#pragma unroll
    for (int down = 0; down < kDown; ++down) {
      if (first + k < N * kSums) total += shared[(first + k) * kThreads + down * kAcross + across];
    }
    totals[k] = factor * total;
  }
  if constexpr (N * kSums % kDown == 0 && (kEach & (kEach - 1)) == 0) {
    Vector<float, kEach>::of(totals).store(to + first);
  } else {
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      if (first + k < N * kSums) to[first + k] = totals[k];
    }
  }
}

// `blocks`: of all but states, kDown chunks by slices of channels; what they add to sums is added up over the chunks.
// What is known without memory comes before the wait. The kernels behind it find room only as its blocks end.
template <int W, int N, class T, bool kSilu, bool kBias>
__global__ void __launch_bounds__(kThreads, 2)
    backward_kernel(Call call, ops::cuda::Division by_slices, ops::cuda::Division by_pieces, std::int64_t blocks,
                    Gradients<T> t, ops::cuda::PartialSums partial) {
  constexpr int kSums = kSumsOf<W, kBias>;
  const std::uint32_t group = by_slices.of(blockIdx.x), chunk = group * kDown + threadIdx.x / kAcross,
                      line = by_pieces.of(chunk);
  const std::int64_t first = std::int64_t{blockIdx.x - group * by_slices.by} * (kAcross * N),
                     d = first + threadIdx.x % kAcross * N;
  const bool there = blockIdx.x < blocks && d < call.channels && line < call.lines;
  const Walk walk(call, line, chunk - line * by_pieces.by);
  if (there) ask_early<N>(t, walk, d);
  flashgla::cuda::wait_for_previous();
  if (blockIdx.x >= blocks) {
    flashgla::cuda::release_next();
    for_state(call, blocks, [&](const Place& place, std::int64_t of_state, std::int64_t channel) {
      initial_state_gradient<W>(call, t, place, of_state, channel);
    });
    return;
  }
  if (threadIdx.x < flashgla::cuda::kWarp) {
    const std::int64_t channels = min(std::int64_t{kAcross * N}, call.channels - first);
    ops::cuda::announce_sums(partial.sums + group * partial.columns + first * kSums,
                             static_cast<int>(channels) * kSums);
  }
  extern __shared__ __align__(16) unsigned char shared[];
  float sums[kSums][N] = {};
  if (there) walk_backward<W, N, kSilu, kBias>(call, t, walk, d, shared, sums);
  __syncthreads();  // of the tokens, whose memory is taken
  write_sums<kSums, N>(call, sums, d < call.channels, reinterpret_cast<float*>(shared),
                       partial.sums + group * partial.columns + d * kSums);
}

}  // namespace flashgla::ops::short_convolution::cuda
