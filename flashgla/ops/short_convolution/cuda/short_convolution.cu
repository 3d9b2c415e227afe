// A thread walks through a chunk of time with a few neighbouring channels, whose last W-1 inputs (and, backward, the
// gradients of the last W-1 inputs, not yet complete) it holds in registers. Notation as in reference.cpp.
#include "flashgla/base/cuda/ptx.cuh"
#include "flashgla/ops/cuda/copy_ahead.cuh"
#include "flashgla/ops/cuda/each_element.cuh"
#include "flashgla/ops/cuda/math.cuh"
#include "flashgla/ops/cuda/partial_sums.cuh"
#include "flashgla/ops/short_convolution/implementations.h"

namespace flashgla::ops::short_convolution {

namespace {

using ops::cuda::Operand;
using ops::cuda::Vector;
using bf16 = __nv_bfloat16;

constexpr int kThreads = 128;
// Tokens of a chunk: as many as give all of a large problem's blocks room at once.
constexpr std::int64_t kForwardChunk = 64, kBackwardChunk = 128;
constexpr int kMostPast = 3;  // tokens that the widest filter looks back
constexpr int kTogether = 4;  // tokens that are copied as one group
constexpr int kAtOnce = 2;    // tokens that are worked on at once where no sequence begins among them
// Groups that a thread has room for: no more than leave room for all blocks of a large problem at once.
template <class T>
constexpr int kGroups = sizeof(T) == 4 ? 3 : 4;

// What every kernel of a call knows. A line is one row of the batch: one sequence, or with cu_seqlens all of them.
struct Call {
  std::int64_t lines, length, channels;
  std::int64_t sequences;
  const void* cu_seqlens;      // null: each line is a sequence
  bool wide_boundaries;        // i64
  const void* weight;          // [D,W]
  bool wide_weight;            // f32
  const float* initial_state;  // [N,D,W-1]; null: zeros
  bool silu;

  __device__ __forceinline__ std::int64_t boundary(std::int64_t n) const {
    return wide_boundaries ? static_cast<const std::int64_t*>(cu_seqlens)[n]
                           : static_cast<const std::int32_t*>(cu_seqlens)[n];
  }
  __device__ __forceinline__ float weight_at(std::int64_t i) const {
    return wide_weight ? static_cast<const float*>(weight)[i]
                       : flashgla::cuda::to_float(static_cast<const bf16*>(weight)[i]);
  }
  // Of a line, with `tokens` each.
  __host__ __device__ std::int64_t chunks(std::int64_t tokens) const { return (length + tokens - 1) / tokens; }
};

// A sequence: number n, tokens [begin, end) of its line.
struct Place {
  std::int64_t n, begin, end;
};

__device__ __forceinline__ Place place_of(const Call& problem, std::int64_t n) {
  if (!problem.cu_seqlens) return {n, 0, problem.length};
  return {n, problem.boundary(n), problem.boundary(n + 1)};
}

// The sequence that token t of a line belongs to.
__device__ __forceinline__ Place place_at(const Call& problem, std::int64_t line, std::int64_t t) {
  if (!problem.cu_seqlens) return {line, 0, problem.length};
  std::int64_t low = 0, high = problem.sequences;  // the last that begins at or before t
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (problem.boundary(middle) <= t ? low : high) = middle;
  }
  return place_of(problem, low);
}

// The sequence after `place`'s that has a token at t, its end.
__device__ __forceinline__ Place place_after(const Call& problem, Place place, std::int64_t t) {
  do {
    place = place_of(problem, place.n + 1);
  } while (place.end <= t);
  return place;
}

// A tensor [B,T,D] in a kernel, D contiguous.
template <class T>
struct Lines {
  T* data;
  std::int64_t line_stride, token_stride;

  explicit Lines(const TensorView& view)
      : data(static_cast<T*>(view.data)), line_stride(view.stride[0]), token_stride(view.stride[1]) {}

  __device__ __forceinline__ T* at(std::int64_t line, std::int64_t t, std::int64_t d) const {
    return data + line * line_stride + t * token_stride + d;
  }
};

// The values of a thread's tokens on their way into shared memory, of kTensors tensors.
template <int kTensors, int N, class T>
struct TokensAhead {
  static constexpr int kVectorBytes = Vector<T, N>::kBytes;
  static constexpr int kBytes = kGroups<T> * kTensors * kTogether * kThreads * kVectorBytes;
  unsigned char* shared;  // kBytes, at a multiple of 16

  // Of token i + k behind the walk's first, which is of i's group.
  __device__ __forceinline__ T* place_of(int i, int k, int tensor) const {
    const int at = (i % (kGroups<T> * kTogether) + k) * kTensors + tensor;
    return reinterpret_cast<T*>(shared + (at * kThreads + static_cast<int>(threadIdx.x)) * kVectorBytes);
  }
};

template <int N, class T>
__device__ __forceinline__ void load(const T* from, float (&out)[N]) {
  const Vector<T, N> vector = Vector<T, N>::load(from);
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = vector[i];
}

// Element i of a channel's state [N,D,W-1].
template <int W>
__device__ __forceinline__ std::int64_t state_at(const Call& problem, std::int64_t n, std::int64_t d, int i) {
  return (n * problem.channels + d) * (W - 1) + i;
}

// The last W-1 inputs of N channels, oldest first, and the filter.
template <int W, int N>
struct Filter {
  float weight[W][N], window[W - 1][N];

  __device__ __forceinline__ Filter(const Call& problem, std::int64_t d) {
#pragma unroll
    for (int j = 0; j < W; ++j) {
#pragma unroll
      for (int i = 0; i < N; ++i) weight[j][i] = problem.weight_at((d + i) * W + j);
    }
  }

  // As before token t of the sequence.
  template <class T>
  __device__ __forceinline__ void begin_at(const Call& problem, const Lines<T>& x, std::int64_t line,
                                           const Place& place, std::int64_t t, std::int64_t d) {
#pragma unroll
    for (int j = 0; j < W - 1; ++j) {
      const std::int64_t source = t - (W - 1) + j;
      if (source >= place.begin) {
        load<N>(x.at(line, source, d), window[j]);
      } else {
        const int at = static_cast<int>(source - place.begin + (W - 1));
#pragma unroll
        for (int i = 0; i < N; ++i) {
          window[j][i] = problem.initial_state ? problem.initial_state[state_at<W>(problem, place.n, d + i, at)] : 0.0f;
        }
      }
    }
  }

  // e: the window and K tokens behind it. z of token k, channel i.
  template <int K>
  __device__ __forceinline__ float convolved(const float (&e)[W - 1 + K][N], int k, int i) const {
    float z = weight[W - 1][i] * e[k + W - 1][i];
#pragma unroll
    for (int j = 0; j < W - 1; ++j) z = fmaf(weight[j][i], e[k + j][i], z);
    return z;
  }

  // The window, and behind it what arrives with K tokens from i on.
  template <int K, class Ahead>
  __device__ __forceinline__ void extend(const Ahead& ahead, int token, float (&e)[W - 1 + K][N]) const {
#pragma unroll
    for (int j = 0; j < W - 1; ++j) {
#pragma unroll
      for (int i = 0; i < N; ++i) e[j][i] = window[j][i];
    }
#pragma unroll
    for (int k = 0; k < K; ++k) load<N>(ahead.place_of(token, k, 0), e[W - 1 + k]);
  }

  template <int K>
  __device__ __forceinline__ void advance(const float (&e)[W - 1 + K][N]) {
#pragma unroll
    for (int j = 0; j < W - 1; ++j) {
#pragma unroll
      for (int i = 0; i < N; ++i) window[j][i] = e[j + K][i];
    }
  }
};

// Blocks of a launch: `walking` for the chunks, `slices` of channels each, then those for the states.
struct Grid {
  std::int64_t walking, slices, state_blocks;

  Grid(const Call& problem, int elements, bool states, std::int64_t chunk) {
    slices = (problem.channels + kThreads * elements - 1) / (kThreads * elements);
    walking = problem.lines * problem.chunks(chunk) * slices;
    state_blocks = states ? (problem.sequences * problem.channels + kThreads - 1) / kThreads : 0;
  }
  std::int64_t blocks() const { return walking + state_blocks; }
};

// The work of a walking block's thread.
struct Walk {
  std::int64_t chunk, line, begin, end;  // chunk counts over all lines; tokens of the line

  __device__ __forceinline__ Walk(const Call& problem, const Grid& grid, std::int64_t tokens)
      : chunk(blockIdx.x / grid.slices),
        line(chunk / problem.chunks(tokens)),
        begin(chunk % problem.chunks(tokens) * tokens),
        end(begin + tokens < problem.length ? begin + tokens : problem.length) {}
  __device__ __forceinline__ int tokens() const { return static_cast<int>(end - begin); }
  static constexpr std::int64_t kFarBehind = 2 * kBackwardChunk;
  // Which of the walk's tokens t is; -1 where it is before them, one that it does not come to where far behind.
  __device__ __forceinline__ int place_of(std::int64_t t) const {
    const std::int64_t i = t - begin;
    return static_cast<int>(i < -1 ? -1 : i < kFarBehind ? i : kFarBehind);
  }
};
// Its first channel, which may be beyond the last.
template <int N>
__device__ __forceinline__ std::int64_t channel_of(const Grid& grid) {
  return (blockIdx.x % grid.slices * kThreads + threadIdx.x) * N;
}

// One channel of one sequence, at [i] of the states.
template <class Body>
__device__ __forceinline__ void for_state(const Call& problem, const Grid& grid, const Body& body) {
  const std::int64_t item = (static_cast<std::int64_t>(blockIdx.x) - grid.walking) * kThreads + threadIdx.x;
  if (item >= problem.sequences * problem.channels) return;
  const Place place = place_of(problem, item / problem.channels);
  body(place, problem.cu_seqlens ? 0 : place.n, item % problem.channels);
}

// Goes through a walk's tokens, whose copies bring(first, k), called in their order, begins groups of tokens ahead.
// Where quiet(first) says that a group has nothing special, work(count, i) takes kAtOnce tokens from i on; else
// announce(i) is called for each token, which says whether there is more to do, and work takes them one by one.
template <int kGroupsAhead, class Bring>
class Tokens {
 public:
  // The first copies are under way from here on.
  __device__ __forceinline__ Tokens(int count, const Bring& bring) : count_(count), bring_(bring) {
#pragma unroll
    for (int group = 0; group < kGroupsAhead - 1; ++group) bring_group(group * kTogether);
  }

  template <class Quiet, class Announce, class Work>
  __device__ __forceinline__ void run(const Quiet& quiet, const Announce& announce, const Work& work) const {
    static_assert(kTogether % kAtOnce == 0);
    bool more = true;
    for (int first = 0; first < count_ && more; first += kTogether) {
      bring_group(first + (kGroupsAhead - 1) * kTogether);
      ops::cuda::wait_for_groups_before<kGroupsAhead - 1>();
      if (quiet(first)) {
#pragma unroll
        for (int k = 0; k < kTogether; k += kAtOnce) work(std::integral_constant<int, kAtOnce>(), first + k);
        continue;
      }
      const int end = first + kTogether < count_ ? first + kTogether : count_;
#pragma unroll 1
      for (int i = first; more && i < end; ++i) {
        more = announce(i);
        if (more) work(std::integral_constant<int, 1>(), i);
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

// e[p], the sequence extended by its initial state in front.
template <int W, class T>
__device__ __forceinline__ float extended(const Call& problem, const Lines<T>& x, const Place& place, std::int64_t line,
                                          std::int64_t d, std::int64_t p) {
  if (p >= W - 1) {
    return flashgla::cuda::to_float(*x.at(line, place.begin + p - (W - 1), d));
  }
  if (!problem.initial_state) return 0.0f;
  return problem.initial_state[state_at<W>(problem, place.n, d, static_cast<int>(p))];
}

template <int W, int N, class T>
__global__ void __launch_bounds__(kThreads, 8)
    forward_kernel(Call problem, Grid grid, Lines<T> x, Lines<T> y, float* final_state) {
  flashgla::cuda::release_next_of_waves();
  flashgla::cuda::wait_for_previous();
  if (blockIdx.x >= grid.walking) {
    for_state(problem, grid, [&](const Place& place, std::int64_t line, std::int64_t d) {
      for (int i = 0; i < W - 1; ++i) {
        final_state[state_at<W>(problem, place.n, d, i)] =
            extended<W>(problem, x, place, line, d, place.end - place.begin + i);
      }
    });
    return;
  }
  const Walk walk(problem, grid, kForwardChunk);
  const std::int64_t d = channel_of<N>(grid);
  if (d >= problem.channels) return;
  extern __shared__ __align__(16) unsigned char shared[];
  const TokensAhead<1, N, T> ahead{shared};
  const T* from = x.at(walk.line, walk.begin, d);
  const auto bring = [&](int first, int k) {
    ops::cuda::begin_copy<N>(ahead.place_of(first, k, 0), from);
    from += x.token_stride;
  };
  const Tokens<kGroups<T>, decltype(bring)> tokens(walk.tokens(), bring);
  Place place = place_at(problem, walk.line, walk.begin);
  int next = walk.place_of(place.end);  // where another sequence begins
  Filter<W, N> filter(problem, d);
  filter.begin_at(problem, x, walk.line, place, walk.begin, d);
  T* to = y.at(walk.line, walk.begin, d);
  const auto quiet = [&](int first) { return first + kTogether <= walk.tokens() && next >= first + kTogether; };
  const auto announce = [&](int i) {
    if (i == next) {
      place = place_after(problem, place, walk.begin + i);
      next = walk.place_of(place.end);
      filter.begin_at(problem, x, walk.line, place, walk.begin + i, d);
    }
    return true;
  };
  tokens.run(quiet, announce, [&](auto count, int i) {
    constexpr int K = decltype(count)::value;
    float e[W - 1 + K][N], out[K][N];
    filter.template extend<K>(ahead, i, e);
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
      for (int c = 0; c < N; ++c) out[k][c] = filter.template convolved<K>(e, k, c);
    }
    if (problem.silu) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
#pragma unroll
        for (int c = 0; c < N; ++c) out[k][c] *= ops::cuda::sigmoid(out[k][c]);
      }
    }
#pragma unroll
    for (int k = 0; k < K; ++k) {
      Vector<T, N>::of(out[k]).store(to);
      to += y.token_stride;
    }
    filter.template advance<K>(e);
  });
}

template <class T>
struct Gradients {
  Lines<T> x, dy, dx;
  const float* d_final_state;  // null: zero
  float* d_initial_state;      // null: not wanted
};

// dz of one element.
__device__ __forceinline__ float through_silu(float z, float dy) {
  return dy * ops::cuda::silu_slope(z, ops::cuda::sigmoid(z));
}

// Writes what is pending of dx at the sequence's end: `pending[j]` belongs to token end - (W-1) + j.
template <int W, int N, class T>
__device__ __forceinline__ void finish_sequence(const Call& problem, const Gradients<T>& t, const Walk& walk,
                                                const Place& place, std::int64_t d, float (&pending)[W - 1][N]) {
#pragma unroll
  for (int j = 0; j < W - 1; ++j) {
    const std::int64_t token = place.end - (W - 1) + j;
    if (token >= place.begin && token >= walk.begin && token < walk.end) {
      float out[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        out[i] = pending[j][i];
        if (t.d_final_state) out[i] += t.d_final_state[state_at<W>(problem, place.n, d + i, j)];
      }
      Vector<T, N>::of(out).store(t.dx.at(walk.line, token, d));
    }
#pragma unroll
    for (int i = 0; i < N; ++i) pending[j][i] = 0.0f;
  }
}

// The gradient of a channel's initial state.
template <int W, class T>
__device__ __forceinline__ void initial_state_gradient(const Call& problem, const Gradients<T>& t, const Place& place,
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
      z += problem.weight_at(d * W + j) * extended<W>(problem, t.x, place, line, d, s + j);
    }
    const float dy = flashgla::cuda::to_float(*t.dy.at(line, place.begin + s, d));
    dz[s] = problem.silu ? through_silu(z, dy) : dy;
  }
#pragma unroll
  for (int p = 0; p < W - 1; ++p) {
    float total = 0.0f;
#pragma unroll
    for (int j = 0; j <= p; ++j) total += problem.weight_at(d * W + j) * dz[p - j];
    if (p >= length && t.d_final_state) {
      total += t.d_final_state[state_at<W>(problem, place.n, d, static_cast<int>(p - length))];
    }
    t.d_initial_state[state_at<W>(problem, place.n, d, p)] = total;
  }
}

template <int W, int N, class T>
__global__ void __launch_bounds__(kThreads, 4)
    backward_kernel(Call problem, Grid grid, Gradients<T> t, ops::cuda::PartialSums partial) {
  flashgla::cuda::release_next_of_waves();
  flashgla::cuda::wait_for_previous();
  if (blockIdx.x >= grid.walking) {
    for_state(problem, grid, [&](const Place& place, std::int64_t line, std::int64_t d) {
      initial_state_gradient<W>(problem, t, place, line, d);
    });
    return;
  }
  const Walk walk(problem, grid, kBackwardChunk);
  const std::int64_t d = channel_of<N>(grid);
  if (d >= problem.channels) return;
  // Tokens of the chunk, and the W-1 behind it, as far as they are of the sequence of its last.
  const std::int64_t stop = walk.end + W - 1 < problem.length ? walk.end + W - 1 : problem.length;
  extern __shared__ __align__(16) unsigned char shared[];
  const TokensAhead<2, N, T> ahead{shared};
  const T *from_x = t.x.at(walk.line, walk.begin, d), *from_dy = t.dy.at(walk.line, walk.begin, d);
  const auto bring = [&](int first, int k) {
    ops::cuda::begin_copy<N>(ahead.place_of(first, k, 0), from_x);
    ops::cuda::begin_copy<N>(ahead.place_of(first, k, 1), from_dy);
    from_x += t.x.token_stride;
    from_dy += t.dy.token_stride;
  };
  const Tokens<kGroups<T>, decltype(bring)> tokens(static_cast<int>(stop - walk.begin), bring);
  Place place = place_at(problem, walk.line, walk.begin);
  int begins = walk.place_of(place.begin), next = walk.place_of(place.end);
  Filter<W, N> filter(problem, d);
  filter.begin_at(problem, t.x, walk.line, place, walk.begin, d);
  float dweight[W][N] = {}, pending[W - 1][N] = {};  // pending[j]: of dx at token i - (W-1) + j
  bool finished = false;
  T* to = t.dx.at(walk.line, walk.begin - (W - 1), d);  // of token i - (W-1), which may not be there
  const auto quiet = [&](int first) { return first + kTogether <= walk.tokens() && next >= first + kTogether; };
  const auto announce = [&](int i) {
    if (i == next) {
      finish_sequence<W>(problem, t, walk, place, d, pending);
      finished = i >= walk.tokens();
      if (finished) return false;
      place = place_after(problem, place, walk.begin + i);
      begins = walk.place_of(place.begin), next = walk.place_of(place.end);
      filter.begin_at(problem, t.x, walk.line, place, walk.begin + i, d);
    }
    return true;
  };
  tokens.run(quiet, announce, [&](auto count, int i) {
    constexpr int K = decltype(count)::value;
    float e[W - 1 + K][N], dz[K][N];
    filter.template extend<K>(ahead, i, e);
#pragma unroll
    for (int k = 0; k < K; ++k) load<N>(ahead.place_of(i, k, 1), dz[k]);
    if (problem.silu) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
#pragma unroll
        for (int c = 0; c < N; ++c) dz[k][c] = through_silu(filter.template convolved<K>(e, k, c), dz[k][c]);
      }
    }
    if (i < walk.tokens()) {  // of K tokens all or none: more than one are of the chunk
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
      if (const int token = i + k - (W - 1); token >= 0 && token >= begins) Vector<T, N>::of(out).store(to);
      to += t.dx.token_stride;
    }
    filter.template advance<K>(e);
  });
  if (!finished && place.end == stop) finish_sequence<W>(problem, t, walk, place, d, pending);
  float sums[N][W];
#pragma unroll
  for (int i = 0; i < N; ++i) {
#pragma unroll
    for (int j = 0; j < W; ++j) sums[i][j] = dweight[j][i];
    float* to_sums = partial.sums + walk.chunk * partial.columns + (d + i) * W;
    if constexpr (W == 3) {
#pragma unroll
      for (int j = 0; j < W; ++j) to_sums[j] = sums[i][j];
    } else {
      Vector<float, W>::of(sums[i]).store(to_sums);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(256)
    step_kernel(Operand<T> x, Operand<T> y, const void* weight, const void* bias, bool wide_weight, float* states,
                std::int64_t batch, std::int64_t channels, int width, bool silu) {
  // A projection of the same token comes next, which asks for its weights meanwhile, as this kernel does.
  flashgla::cuda::release_next();
  const std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const bool there = item < batch * channels;
  const std::int64_t row = item / channels, d = item % channels;
  const auto parameter = [there, wide_weight](const void* from, std::int64_t i) {
    if (!there || from == nullptr) return 0.0f;
    return wide_weight ? static_cast<const float*>(from)[i]
                       : flashgla::cuda::to_float(static_cast<const bf16*>(from)[i]);
  };
  const float last = parameter(weight, d * width + width - 1), offset = parameter(bias, d);
  float weights[kMostPast], past[kMostPast];
#pragma unroll
  for (int j = 0; j < kMostPast; ++j) weights[j] = j < width - 1 ? parameter(weight, d * width + j) : 0.0f;
  float* state = states + item * (width - 1);
  if (there) ptx::prefetch_l2(state);
  flashgla::cuda::wait_for_previous();
  if (!there) return;
  const float arriving = flashgla::cuda::to_float(*x.at(row, d));
#pragma unroll
  for (int j = 0; j < kMostPast; ++j) past[j] = j < width - 1 ? state[j] : 0.0f;
  float z = last * arriving;
#pragma unroll
  for (int j = 0; j < kMostPast; ++j) {
    if (j >= width - 1) break;
    z = fmaf(weights[j], past[j], z);
    if (j > 0) state[j - 1] = past[j];
  }
  state[width - 2] = arriving;
  z += offset;
  *y.at(row, d) = flashgla::cuda::from_float<T>(silu ? z * ops::cuda::sigmoid(z) : z);
}

// ---- on the host ----

Call call_of(const Inputs& inputs, Activation activation) {
  const TensorView& x = inputs.x;
  return {x.size(0),
          x.size(1),
          x.size(2),
          sequences_of(inputs),
          inputs.cu_seqlens.data,
          inputs.cu_seqlens.dtype == DType::i64,
          inputs.weight.data,
          inputs.weight.dtype == DType::f32,
          inputs.initial_state ? inputs.initial_state.as<float>() : nullptr,
          activation == Activation::silu};
}

// Calls run(integral_constant W).
template <class Run>
void with_width(std::int64_t width, const Run& run) {
  if (width == 2) return run(std::integral_constant<int, 2>());
  if (width == 3) return run(std::integral_constant<int, 3>());
  run(std::integral_constant<int, 4>());
}

// Channels of a thread, where their number and addresses are multiples of it. With eight of bf16, 16 bytes, a forward
// thread had 120 registers, and a multiprocessor half as many threads.
constexpr int kElements = 4;

template <int N, class T>
void forward_of(Context& context, const Inputs& inputs, const Outputs& outputs, Activation activation) {
  const Call problem = call_of(inputs, activation);
  const Grid grid(problem, N, static_cast<bool>(outputs.final_state), kForwardChunk);
  auto* final_state = outputs.final_state ? outputs.final_state.as<float>() : nullptr;
  with_width(inputs.weight.size(1), [&](auto width) {
    ops::cuda::queue_kernel(context, "short_convolution", forward_kernel<width.value, N, T>, grid.blocks(), kThreads,
                            TokensAhead<1, N, T>::kBytes, problem, grid, Lines<T>(inputs.x), Lines<T>(outputs.y),
                            final_state);
  });
}

template <int N, class T>
void backward_of(Context& context, const Inputs& inputs, const OutputGradients& from, const InputGradients& to,
                 Activation activation, const ops::cuda::PartialSums& partial) {
  const Call problem = call_of(inputs, activation);
  const Grid grid(problem, N, static_cast<bool>(to.d_initial_state), kBackwardChunk);
  const Gradients<T> gradients{Lines<T>(inputs.x), Lines<T>(from.dy), Lines<T>(to.dx),
                               from.d_final_state ? from.d_final_state.as<float>() : nullptr,
                               to.d_initial_state ? to.d_initial_state.as<float>() : nullptr};
  with_width(inputs.weight.size(1), [&](auto width) {
    ops::cuda::queue_kernel(context, "short_convolution", backward_kernel<width.value, N, T>, grid.blocks(), kThreads,
                            TokensAhead<2, N, T>::kBytes, problem, grid, gradients, partial);
  });
}

template <class T>
void forward_of(Context& context, const Inputs& inputs, const Outputs& outputs, Activation activation) {
  const bool aligned = inputs.x.size(2) % kElements == 0 && ops::cuda::are_aligned({&inputs.x, &outputs.y}, kElements);
  (aligned ? forward_of<kElements, T> : forward_of<1, T>)(context, inputs, outputs, activation);
}

void cuda_forward(Context& context, const Inputs& inputs, const Outputs& outputs, Activation activation) {
  if (context.planning()) return;
  (inputs.x.dtype == DType::f32 ? forward_of<float> : forward_of<bf16>)(context, inputs, outputs, activation);
}

void cuda_backward(Context& context, const Inputs& inputs, const OutputGradients& from, const InputGradients& to,
                   Activation activation) {
  const ArenaScope scope(context.scratch());
  const Call problem = call_of(inputs, activation);
  const std::int64_t chunks = problem.lines * problem.chunks(kBackwardChunk);
  const auto partial =
      ops::cuda::take_partial_sums(context, chunks, inputs.weight.numel(), std::max<std::int64_t>(chunks, 1), 1,
                                   "short_convolution: dweight of chunks");
  if (context.planning()) return;
  const bool aligned =
      inputs.x.size(2) % kElements == 0 && ops::cuda::are_aligned({&inputs.x, &from.dy, &to.dx}, kElements);
  const auto run = inputs.x.dtype == DType::f32 ? (aligned ? backward_of<kElements, float> : backward_of<1, float>)
                                                : (aligned ? backward_of<kElements, bf16> : backward_of<1, bf16>);
  run(context, inputs, from, to, activation, partial);
  ops::cuda::reduce(context, partial, to.dweight.as<float>(), true);
}

template <class T>
void step_of(Context& context, const TensorView& x, const TensorView& weight, const TensorView& bias,
             const TensorView& state, const TensorView& y, bool silu) {
  const std::int64_t batch = x.size(0), channels = x.size(1);
  ops::cuda::queue_kernel(context, "short_convolution", step_kernel<T>, (batch * channels + 255) / 256, 256, 0,
                          Operand<T>(x), Operand<T>(y), static_cast<const void*>(weight.data),
                          static_cast<const void*>(bias.data), weight.dtype == DType::f32, state.as<float>(), batch,
                          channels, static_cast<int>(weight.size(1)), silu);
}

void cuda_step(Context& context, const TensorView& x, const TensorView& weight, const TensorView& bias,
               const TensorView& state, const TensorView& y, Activation activation) {
  (x.dtype == DType::f32 ? step_of<float> : step_of<bf16>)(context, x, weight, bias, state, y,
                                                           activation == Activation::silu);
}

}  // namespace

const Implementation kCuda{"cuda",
                           Device::Kind::cuda,
                           [](const Problem& problem, const Architecture&) {
                             return supports_f32_and_bf16({problem.dtype, problem.weight_dtype});
                           },
                           cuda_forward,
                           cuda_backward,
                           cuda_step};

}  // namespace flashgla::ops::short_convolution
