// A thread walks through a chunk of time with some neighbouring channels, whose last W-1 inputs, and the gradients of
// the last W-1 inputs, not yet complete, it holds in registers; tokens come through shared memory.
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
constexpr int kAtOnce = 2;    // tokens that are worked on at once where no sequence begins among them
constexpr int kEarly = 16;    // tokens of a thread that go to the cache while the kernel before this one ends

// The values of a thread's tokens on their way into shared memory, of kTensors tensors.
template <int kTensors, int N, class T>
struct TokensAhead {
  static constexpr int kVectorBytes = Vector<T, N>::kBytes;
  static constexpr int kBytes = kGroups * kTensors * kTogether * kThreads * kVectorBytes;
  unsigned char* shared;  // kBytes, at a multiple of 16

  // Of token i + k behind the walk's first, which is of i's group.
  __device__ __forceinline__ T* place_of(int i, int k, int tensor) const {
    const int at = (i % (kGroups * kTogether) + k) * kTensors + tensor;
    return reinterpret_cast<T*>(shared + (at * kThreads + static_cast<int>(threadIdx.x)) * kVectorBytes);
  }
};

// A thread's chunk: tokens [begin, end) of a line.
struct Walk {
  std::int64_t line, begin, end;

  __device__ __forceinline__ Walk(const Call& call, std::uint32_t of_line, std::uint32_t piece)
      : line(of_line),
        begin(std::int64_t{piece} * kChunk),
        end(begin + kChunk < call.length ? begin + kChunk : call.length) {}
  __device__ __forceinline__ int tokens() const { return static_cast<int>(end - begin); }
  static constexpr std::int64_t kFarBehind = 2 * kChunk;
  // Which of the walk's tokens t is; -1 where it is before them, one that it does not come to where far behind.
  __device__ __forceinline__ int place_of(std::int64_t t) const {
    const std::int64_t i = t - begin;
    return static_cast<int>(i < -1 ? -1 : i < kFarBehind ? i : kFarBehind);
  }
};

// Goes through a walk's tokens, whose copies bring(first, k), called in their order, begins groups of tokens ahead.
// Where quiet(first) says that no sequence begins in a group, work(count, tested, i) takes kAtOnce tokens from i on,
// and where clear(first) says that also the tokens that they complete are of the walk and of one sequence, `tested` is
// false; else announce(i) is called for each token, which says whether there is more to do, and work takes them one by
// one.
template <class Bring>
class Tokens {
 public:
  // The first copies are under way from here on.
  __device__ __forceinline__ Tokens(int count, const Bring& bring) : count_(count), bring_(bring) {
#pragma unroll
    for (int group = 0; group < kGroups - 1; ++group) bring_group(group * kTogether);
  }

  template <class Quiet, class Clear, class Announce, class Work>
  __device__ __forceinline__ void run(const Quiet& quiet, const Clear& clear, const Announce& announce,
                                      const Work& work) const {
    static_assert(kTogether % kAtOnce == 0);
    bool more = true;
    for (int first = 0; first < count_ && more; first += kTogether) {
      bring_group(first + (kGroups - 1) * kTogether);
      ops::cuda::wait_for_groups_before<kGroups - 1>();
      const auto together = [&](auto tested) {
#pragma unroll
        for (int k = 0; k < kTogether; k += kAtOnce) work(std::integral_constant<int, kAtOnce>(), tested, first + k);
      };
      if (quiet(first)) {
        clear(first) ? together(std::false_type()) : together(std::true_type());
        continue;
      }
      const int end = first + kTogether < count_ ? first + kTogether : count_;
#pragma unroll 1
      for (int i = first; more && i < end; ++i) {
        more = announce(i);
        if (more) work(std::integral_constant<int, 1>(), std::true_type(), i);
      }
    }
    ops::cuda::wait_for_groups_before<0>();  // nothing may come after the block's end
  }

 private:
  __device__ __forceinline__ void bring_group(int first) const {
    if (first + kTogether <= count_) {
#pragma unroll
      for (int k = 0; k < kTogether; ++k) bring_(first, k);
    } else {
#pragma unroll 1
      for (int k = 0; first + k < count_; ++k) bring_(first, k);
    }
    ops::cuda::end_group();
  }

  int count_;
  const Bring& bring_;
};

template <class T>
struct Gradients {
  Lines<T> x, dy, dx;
  const float* d_final_state;  // null: zero
  float* d_initial_state;      // null: not wanted
};

// Asks for a walk's first tokens, each line of memory by one thread.
template <int N, class T>
__device__ __forceinline__ void ask_early(const Gradients<T>& t, const Walk& walk, std::int64_t d) {
  constexpr int kThreadsOfLine = 128 / Vector<T, N>::kBytes;
  if (threadIdx.x % kThreadsOfLine != 0) return;
  const T *from_x = t.x.at(walk.line, walk.begin, d), *from_dy = t.dy.at(walk.line, walk.begin, d);
#pragma unroll 1
  for (int i = 0; i < kEarly && i < walk.tokens(); ++i) {
    ptx::prefetch_l2(from_x);
    ptx::prefetch_l2(from_dy);
    from_x += t.x.token_stride;
    from_dy += t.dy.token_stride;
  }
}

// Writes what is pending of dx at the sequence's end: `pending[j]` belongs to token end - (W-1) + j.
template <int W, int N, class T>
__device__ __forceinline__ void finish_sequence(const Call& call, const Gradients<T>& t, const Walk& walk,
                                                const Place& place, std::int64_t d, float (&pending)[W - 1][N]) {
#pragma unroll
  for (int j = 0; j < W - 1; ++j) {
    const std::int64_t token = place.end - (W - 1) + j;
    if (token >= place.begin && token >= walk.begin && token < walk.end) {
      float out[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        out[i] = pending[j][i];
        if (t.d_final_state) out[i] += t.d_final_state[state_at<W>(call, place.n, d + i, j)];
      }
      Vector<T, N>::of(out).store(t.dx.at(walk.line, token, d));
    }
#pragma unroll
    for (int i = 0; i < N; ++i) pending[j][i] = 0.0f;
  }
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
    float z = 0.0f;
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

// dx of a chunk's channels from d on, and what it adds to dweight, but for the filter's factor.
template <int W, int N, bool kSilu, class T>
__device__ __forceinline__ void walk_backward(const Call& call, const Gradients<T>& t, const Walk& walk, std::int64_t d,
                                              unsigned char* shared, float (&dweight)[W][N]) {
  // Tokens of the chunk, and the W-1 behind it, as far as they are of the sequence of its last.
  const std::int64_t stop = walk.end + W - 1 < call.length ? walk.end + W - 1 : call.length;
  const TokensAhead<2, N, T> ahead{shared};
  const T *from_x = t.x.at(walk.line, walk.begin, d), *from_dy = t.dy.at(walk.line, walk.begin, d);
  const auto bring = [&](int first, int k) {
    ops::cuda::begin_copy<N>(ahead.place_of(first, k, 0), from_x);
    ops::cuda::begin_copy<N>(ahead.place_of(first, k, 1), from_dy);
    from_x += t.x.token_stride;
    from_dy += t.dy.token_stride;
  };
  const Tokens<decltype(bring)> tokens(static_cast<int>(stop - walk.begin), bring);
  const Filter<W, N> filter(call, d);  // while tokens are on their way
  Place place = ops::cuda::place_at(call, walk.line, walk.begin);
  int begins = walk.place_of(place.begin), next = walk.place_of(place.end);
  float window[W - 1][N], pending[W - 1][N] = {};  // pending[j]: of dx at token i - (W-1) + j
  inputs_before<W, N>(call, t.x, walk.line, place, walk.begin, d, window);
  bool finished = false;
  T* to = t.dx.at(walk.line, walk.begin - (W - 1), d);  // of token i - (W-1), which may not be there
  const auto quiet = [&](int first) { return first + kTogether <= walk.tokens() && next >= first + kTogether; };
  const auto clear = [&](int first) { return first > 0 && begins <= first - (W - 1); };
  const auto announce = [&](int i) {
    if (i == next) {
      finish_sequence<W>(call, t, walk, place, d, pending);
      finished = i >= walk.tokens();
      if (finished) return false;
      place = ops::cuda::place_after(call, place, walk.begin + i);
      begins = walk.place_of(place.begin), next = walk.place_of(place.end);
      inputs_before<W, N>(call, t.x, walk.line, place, walk.begin + i, d, window);
    }
    return true;
  };
  static_assert(kTogether >= W - 1);
  tokens.run(quiet, clear, announce, [&](auto count, auto tested, int i) {
    constexpr int K = decltype(count)::value;
    constexpr bool kTested = decltype(tested)::value;
    float e[W - 1 + K][N], dz[K][N];  // the window, and behind it K tokens from i on
#pragma unroll
    for (int j = 0; j < W - 1; ++j) {
#pragma unroll
      for (int c = 0; c < N; ++c) e[j][c] = window[j][c];
    }
#pragma unroll
    for (int k = 0; k < K; ++k) {
      load<N>(ahead.place_of(i, k, 0), e[W - 1 + k]);
      load<N>(ahead.place_of(i, k, 1), dz[k]);
    }
    if constexpr (kSilu) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
#pragma unroll
        for (int c = 0; c < N; ++c) dz[k][c] = scaled_gradient(filter.convolved(e, k, c), dz[k][c]);
      }
    }
    if (!kTested || i < walk.tokens()) {  // of K tokens all or none: more than one are of the chunk
#pragma unroll
      for (int k = 0; k < K; ++k) {
#pragma unroll
        for (int j = 0; j < W; ++j) {
#pragma unroll
          for (int c = 0; c < N; ++c) dweight[j][c] = fmaf(dz[k][c], e[k + j][c], dweight[j][c]);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < K; ++k) {
      // Token i + k - (W-1) is complete; the others move on.
      float out[N];
#pragma unroll
      for (int c = 0; c < N; ++c) {
        out[c] = fmaf(filter.weight[0][c], dz[k][c], pending[0][c]);
#pragma unroll
        for (int j = 0; j + 1 < W - 1; ++j) {
          pending[j][c] = fmaf(filter.weight[j + 1][c], dz[k][c], pending[j + 1][c]);
        }
        pending[W - 2][c] = filter.weight[W - 1][c] * dz[k][c];
      }
      const int token = i + k - (W - 1);
      if (!kTested || (token >= 0 && token >= begins)) Vector<T, N>::of(out).store(to);
      to += t.dx.token_stride;
    }
#pragma unroll
    for (int j = 0; j < W - 1; ++j) {
#pragma unroll
      for (int c = 0; c < N; ++c) window[j][c] = e[j + K][c];
    }
  });
  if (!finished && place.end == stop) finish_sequence<W>(call, t, walk, place, d, pending);
}

template <int W, int N, class T>
constexpr int kBackwardShared = std::max(TokensAhead<2, N, T>::kBytes, W* N* kThreads* static_cast<int>(sizeof(float)));

// Writes what a block adds to dweight: the sum over its kDown chunks, of which each of a channel's kDown threads adds
// up and writes a part, to `to` on. `there`: whether the channels are; `shared`: W N floats a thread.
template <int W, int N>
__device__ __forceinline__ void write_sums(const Call& call, const float (&dweight)[W][N], bool there, float* shared,
                                           float* to) {
#pragma unroll
  for (int j = 0; j < W; ++j) {
#pragma unroll
    for (int i = 0; i < N; ++i) shared[(i * W + j) * kThreads + threadIdx.x] = dweight[j][i];
  }
  __syncthreads();
  if (!there) return;
  constexpr int kEach = (N * W + kDown - 1) / kDown;
  const float factor = call.silu ? -kLog2OfE : 1.0f;
  const int across = threadIdx.x % kAcross, first = static_cast<int>(threadIdx.x / kAcross) * kEach;
  float totals[kEach];
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    float total = 0.0f;
#pragma unroll
    for (int down = 0; down < kDown; ++down) {
      if (first + k < N * W) total += shared[(first + k) * kThreads + down * kAcross + across];
    }
    totals[k] = factor * total;
  }
  if constexpr (N * W % kDown == 0 && (kEach & (kEach - 1)) == 0) {
    Vector<float, kEach>::of(totals).store(to + first);
  } else {
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      if (first + k < N * W) to[first + k] = totals[k];
    }
  }
}

// `blocks`: of all but states, kDown chunks by slices of channels; what they add to dweight is summed over the chunks.
// What is known without memory comes before the wait. The kernels behind it find room only as its blocks end.
template <int W, int N, class T, bool kSilu>
__global__ void __launch_bounds__(kThreads, 2)
    backward_kernel(Call call, ops::cuda::Division by_slices, ops::cuda::Division by_pieces, std::int64_t blocks,
                    Gradients<T> t, ops::cuda::PartialSums partial) {
  flashgla::cuda::release_next();
  const std::uint32_t group = by_slices.of(blockIdx.x), chunk = group * kDown + threadIdx.x / kAcross,
                      line = by_pieces.of(chunk);
  const std::int64_t d = std::int64_t{(blockIdx.x - group * by_slices.by) * kAcross + threadIdx.x % kAcross} * N;
  const bool there = blockIdx.x < blocks && d < call.channels && line < call.lines;
  const Walk walk(call, line, chunk - line * by_pieces.by);
  if (there) ask_early<N>(t, walk, d);
  flashgla::cuda::wait_for_previous();
  if (blockIdx.x >= blocks) {
    for_state(call, blocks, [&](const Place& place, std::int64_t of_state, std::int64_t channel) {
      initial_state_gradient<W>(call, t, place, of_state, channel);
    });
    return;
  }
  extern __shared__ __align__(16) unsigned char shared[];
  float dweight[W][N] = {};
  if (there) walk_backward<W, N, kSilu>(call, t, walk, d, shared, dweight);
  __syncthreads();  // of the tokens, whose memory is taken
  write_sums<W, N>(call, dweight, d < call.channels, reinterpret_cast<float*>(shared),
                   partial.sums + group * partial.columns + d * W);
}

}  // namespace flashgla::ops::short_convolution::cuda
