// A thread takes a segment of a line's tokens and a few neighbouring channels; what it reads of some tokens is asked
// for at once. Forward a segment is just those, so that blocks that run at a time lie close together in memory;
// backward, where what a segment adds to dmu is written, it walks through more.
#include "flashgla/ops/cuda/each_element.cuh"
#include "flashgla/ops/cuda/lines.cuh"
#include "flashgla/ops/cuda/partial_sums.cuh"
#include "flashgla/ops/token_shift/implementations.h"
#include "flashgla/ops/weight_in_f32.h"

namespace flashgla::ops::token_shift {

namespace {

using ops::cuda::Place;
using ops::cuda::place_after;
using ops::cuda::place_at;
using ops::cuda::Vector;
using bf16 = __nv_bfloat16;

constexpr int kThreads = 128;
constexpr int kSegment = 32;       // tokens, backward
constexpr int kTogether = 4;       // tokens that are asked for at once
constexpr int kForwardTokens = 8;  // a segment forward, all asked for at once

// What every kernel of a call knows. A line is a row of the batch: one sequence, or with cu_seqlens all of them.
struct Call {
  std::int64_t lines, length, channels, mixes, sequences;
  const std::int32_t* cu_seqlens;  // null: each line is a sequence
  const float* mu;                 // [M,D]
  const float* initial_state;      // [N,D]; null: zeros

  __device__ __forceinline__ std::int64_t boundary(std::int64_t n) const { return cu_seqlens[n]; }
  // Of a line.
  __host__ __device__ std::int64_t segments(std::int64_t tokens) const { return (length + tokens - 1) / tokens; }
};

// A tensor [B,T,D] or [M,B,T,D] in a kernel, D contiguous.
template <class T>
struct Lines {
  T* data;
  std::int64_t mix_stride, line_stride, token_stride;

  explicit Lines(const TensorView& view) : data(static_cast<T*>(view.data)) {
    const auto rank = static_cast<std::size_t>(view.rank());
    mix_stride = rank == 4 ? view.stride[0] : 0;
    line_stride = view.stride[rank - 3];
    token_stride = view.stride[rank - 2];
  }
  __device__ __forceinline__ T* at(std::int64_t m, std::int64_t line, std::int64_t t, std::int64_t channel) const {
    return data + m * mix_stride + line * line_stride + t * token_stride + channel;
  }
};

// Where a thread stands: its segment's tokens, its first channel.
struct Where {
  std::int64_t line, begin, end, channel;

  // Segment `segment` of all lines' of so many tokens.
  __device__ __forceinline__ Where(const Call& call, int tokens, std::uint32_t segment, std::int64_t channel)
      : channel(channel) {
    const auto segments = static_cast<std::uint32_t>(call.segments(tokens));
    line = segment / segments;
    begin = std::int64_t{segment % segments} * tokens;
    end = begin + tokens < call.length ? begin + tokens : call.length;
  }
};

template <class T, int N>
__device__ __forceinline__ void unpack(const Vector<T, N>& from, float (&to)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = from[i];
}

// x before a sequence's first token.
template <int N>
__device__ __forceinline__ void load_state(const Call& call, const Place& place, std::int64_t channel, float (&to)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    to[i] = call.initial_state == nullptr ? 0.0f : call.initial_state[place.n * call.channels + channel + i];
  }
}

// x before a segment's first token.
template <class T, int N>
__device__ __forceinline__ void load_previous(const Call& call, const Lines<T>& x, const Where& where,
                                              const Place& place, float (&to)[N]) {
  if (place.begin == where.begin) return load_state(call, place, where.channel, to);
  unpack(Vector<T, N>::load(x.at(0, where.line, where.begin - 1, where.channel)), to);
}

template <class T, int N, int M>
__global__ void __launch_bounds__(kThreads, 1)  // 1: ptxas else spills
    forward_kernel(Call call, Lines<T> x, Lines<T> y, float* final_state) {
  flashgla::cuda::release_next_of_waves();
  flashgla::cuda::wait_for_previous();
  // In 32 bits: 2^32 threads would have 2^35 elements, and a division of 64 bits is a call that spills.
  const std::uint32_t item = blockIdx.x * kThreads + threadIdx.x;
  const auto vectors = static_cast<std::uint32_t>(call.channels / N);
  const std::uint32_t segment = item / vectors;
  const Where where(call, kForwardTokens, segment, std::int64_t{item - segment * vectors} * N);
  if (where.line >= call.lines) return;
  const int count = static_cast<int>(where.end - where.begin);
  Vector<T, N> tokens[kForwardTokens];
  const T* from = x.at(0, where.line, where.begin, where.channel);
#pragma unroll
  for (int t = 0; t < kForwardTokens; ++t) {
    tokens[t] = Vector<T, N>::zero();
    if (t < count) tokens[t] = Vector<T, N>::load(from);
    from += x.token_stride;
  }
  Place place = place_at(call, where.line, where.begin);
  float previous[N], mu[M][N];
  load_previous(call, x, where, place, previous);
#pragma unroll
  for (int m = 0; m < M; ++m) unpack(Vector<float, N>::load(call.mu + m * call.channels + where.channel), mu[m]);
  T* to = y.at(0, where.line, where.begin, where.channel);
#pragma unroll
  for (int t = 0; t < kForwardTokens; ++t) {
    if (t >= count) break;
    if (where.begin + t == place.end) {
      place = place_after(call, place, where.begin + t);
      load_state(call, place, where.channel, previous);
    }
    float own[N];
    unpack(tokens[t], own);
#pragma unroll
    for (int m = 0; m < M; ++m) {
      float mixed[N];
#pragma unroll
      for (int i = 0; i < N; ++i) mixed[i] = fmaf(mu[m][i], own[i] - previous[i], previous[i]);
      Vector<T, N>::of(mixed).store(to + m * y.mix_stride);
    }
    to += y.token_stride;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      previous[i] = own[i];
      if (final_state != nullptr && where.begin + t + 1 == place.end) {
        final_state[place.n * call.channels + where.channel + i] = own[i];
      }
    }
  }
}

// dx of a segment's channels, and what it adds to dmu.
template <class T, int N, int M>
__device__ __forceinline__ void walk_backward(const Call& call, const Lines<T>& x, const Lines<T>& dy,
                                              const Lines<T>& dx, const Where& where, float (&dmu)[M][N]) {
  Place place = place_at(call, where.line, where.begin);
  float previous[N], mu[M][N];
  load_previous(call, x, where, place, previous);
  Vector<T, N> now[M];  // dy of the token
#pragma unroll
  for (int m = 0; m < M; ++m) {
    unpack(Vector<float, N>::load(call.mu + m * call.channels + where.channel), mu[m]);
    now[m] = Vector<T, N>::load(dy.at(m, where.line, where.begin, where.channel));
  }
  for (std::int64_t first = where.begin; first < where.end; first += kTogether) {
    Vector<T, N> tokens[kTogether], behind[kTogether][M];  // behind: dy one token later
#pragma unroll
    for (int t = 0; t < kTogether; ++t) {
      tokens[t] = Vector<T, N>::zero();
      if (first + t < where.end) tokens[t] = Vector<T, N>::load(x.at(0, where.line, first + t, where.channel));
#pragma unroll
      for (int m = 0; m < M; ++m) {
        behind[t][m] = Vector<T, N>::zero();
        if (first + t < where.end && first + t + 1 < call.length) {
          behind[t][m] = Vector<T, N>::load(dy.at(m, where.line, first + t + 1, where.channel));
        }
      }
    }
#pragma unroll
    for (int t = 0; t < kTogether; ++t) {
      if (first + t >= where.end) break;
      if (first + t == place.end) {
        place = place_after(call, place, first + t);
        load_state(call, place, where.channel, previous);
      }
      const bool last = first + t + 1 == place.end;
      float own[N], sum[N] = {};
      unpack(tokens[t], own);
#pragma unroll
      for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          sum[i] = fmaf(mu[m][i], now[m][i], sum[i]);
          dmu[m][i] = fmaf(now[m][i], own[i] - previous[i], dmu[m][i]);
          if (!last) sum[i] = fmaf(1.0f - mu[m][i], behind[t][m][i], sum[i]);
        }
        now[m] = behind[t][m];
      }
      Vector<T, N>::of(sum).store(dx.at(0, where.line, first + t, where.channel));
#pragma unroll
      for (int i = 0; i < N; ++i) previous[i] = own[i];
    }
  }
}

// Each warp of a block takes a segment of the same channels: what they add to dmu is summed before it is written, to
// sums [groups of segments,M,D].
constexpr int kAcross = 32, kDown = kThreads / kAcross;

template <class T, int N, int M>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(Call call, Lines<T> x, Lines<T> dy, Lines<T> dx, float* sums) {
  flashgla::cuda::wait_for_previous();
  __shared__ float shared[M * N][kThreads];
  const auto slices = static_cast<std::uint32_t>((call.channels + kAcross * N - 1) / (kAcross * N));
  const std::uint32_t group = blockIdx.x / slices, segment = group * kDown + threadIdx.x / kAcross;
  const std::int64_t channel = std::int64_t{(blockIdx.x - group * slices) * kAcross + threadIdx.x % kAcross} * N;
  float dmu[M][N] = {};
  const Where where(call, kSegment, segment, channel);
  if (channel < call.channels && where.line < call.lines) walk_backward<T, N, M>(call, x, dy, dx, where, dmu);
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int i = 0; i < N; ++i) shared[m * N + i][threadIdx.x] = dmu[m][i];
  }
  __syncthreads();
  if (threadIdx.x >= kAcross || channel >= call.channels) return;
  float* to = sums + std::int64_t{group} * M * call.channels + channel;
#pragma unroll
  for (int m = 0; m < M; ++m) {
    float total[N] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
      for (int down = 0; down < kDown; ++down) total[i] += shared[m * N + i][down * kAcross + threadIdx.x];
    }
    Vector<float, N>::of(total).store(to + m * call.channels);
  }
}

Call call_of(const Inputs& in, const float* mu) {
  return {in.x.size(0),
          in.x.size(1),
          in.x.size(2),
          in.mu.size(0),
          sequences_of(in.x, in.cu_seqlens),
          static_cast<const std::int32_t*>(in.cu_seqlens.data),
          mu,
          static_cast<const float*>(in.initial_state.data)};
}

const float* mixes_in_f32(Context& context, const TensorView& mu) {
  return weight_in_f32(context, mu.reshape(Shape({mu.numel()})), mu.numel());
}

// Calls run(T(), N): four channels a thread where all tensors are laid out for it.
template <class Run>
void with_type(const float* mu, std::initializer_list<const TensorView*> tensors, const Run& run) {
  const TensorView& x = **tensors.begin();
  const bool whole =
      x.size(-1) % 4 == 0 && reinterpret_cast<std::uintptr_t>(mu) % 16 == 0 && ops::cuda::are_aligned(tensors, 4);
  using Four = std::integral_constant<int, 4>;
  using One = std::integral_constant<int, 1>;
  if (x.dtype == DType::f32) return whole ? run(float{}, Four()) : run(float{}, One());
  whole ? run(bf16{}, Four()) : run(bf16{}, One());
}

std::int64_t groups_of(const Call& call) { return (call.lines * call.segments(kSegment) + kDown - 1) / kDown; }

void cuda_forward(Context& context, const Inputs& in, const Outputs& out) {
  const ArenaScope scope(context.scratch());
  const float* mu = mixes_in_f32(context, in.mu);
  if (context.planning()) return;
  const TensorView& state = out.final_state;
  if (state && (in.cu_seqlens || in.x.size(1) == 0)) {  // of sequences without a token
    in.initial_state ? context.queue().copy(state.data, in.initial_state.data, state.bytes())
                     : context.queue().zero(state.data, state.bytes());
  }
  if (in.x.numel() == 0) return;
  with_type(mu, {&in.x, &out.y}, [&](auto zero, auto each) {
    using T = decltype(zero);
    constexpr int N = decltype(each)::value;
    const Call call = call_of(in, mu);
    const std::int64_t threads = call.lines * call.segments(kForwardTokens) * (call.channels / N);
    const std::int64_t blocks = (threads + kThreads - 1) / kThreads;
    using Kernel = void (*)(Call, Lines<T>, Lines<T>, float*);
    constexpr Kernel kernels[kMostMixes] = {forward_kernel<T, N, 1>, forward_kernel<T, N, 2>, forward_kernel<T, N, 3>};
    ops::cuda::queue_kernel(context, "token_shift", kernels[call.mixes - 1], blocks, kThreads, 0, call, Lines<T>(in.x),
                            Lines<T>(out.y), static_cast<float*>(state.data));
  });
}

void cuda_backward(Context& context, const Inputs& in, const TensorView& dy, const InputGradients& to) {
  const ArenaScope scope(context.scratch());
  const float* mu = mixes_in_f32(context, in.mu);
  const Call call = call_of(in, mu);
  const std::int64_t groups = groups_of(call);
  const auto partial = ops::cuda::take_partial_sums(context, groups, in.mu.numel(), std::max<std::int64_t>(groups, 1),
                                                    1, "token_shift: sums of dmu");
  if (context.planning() || in.x.numel() == 0) return;
  with_type(mu, {&in.x, &dy, &to.dx}, [&](auto zero, auto each) {
    using T = decltype(zero);
    constexpr int N = decltype(each)::value;
    const std::int64_t blocks = groups * ((call.channels + kAcross * N - 1) / (kAcross * N));
    using Kernel = void (*)(Call, Lines<T>, Lines<T>, Lines<T>, float*);
    constexpr Kernel kernels[kMostMixes] = {backward_kernel<T, N, 1>, backward_kernel<T, N, 2>,
                                            backward_kernel<T, N, 3>};
    ops::cuda::queue_kernel(context, "token_shift", kernels[call.mixes - 1], blocks, kThreads, 0, call, Lines<T>(in.x),
                            Lines<T>(dy), Lines<T>(to.dx), partial.sums);
  });
  ops::cuda::reduce(context, partial, to.dmu.as<float>(), true);
}

}  // namespace

const Implementation kCuda{
    "cuda", Device::Kind::cuda,
    [](const Problem& problem, const Architecture&) { return supports_f32_and_bf16({problem.dtype}); }, cuda_forward,
    cuda_backward};

}  // namespace flashgla::ops::token_shift
