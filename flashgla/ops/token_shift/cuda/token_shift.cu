// A thread walks through a segment of a line's tokens with a few neighbouring channels; what it reads of some tokens is
// asked for at once.
#include "flashgla/ops/cuda/each_element.cuh"
#include "flashgla/ops/cuda/lines.cuh"
#include "flashgla/ops/elementwise/elementwise.h"
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
constexpr std::int64_t kSegment = 32;  // tokens
constexpr int kTogether = 4;           // tokens that are asked for at once

// What every kernel of a call knows. A line is a row of the batch: one sequence, or with cu_seqlens all of them.
struct Call {
  std::int64_t lines, length, channels, mixes, sequences;
  const std::int32_t* cu_seqlens;  // null: each line is a sequence
  const float* mu;                 // [M,D]
  const float* initial_state;      // [N,D]; null: zeros

  __device__ __forceinline__ std::int64_t boundary(std::int64_t n) const { return cu_seqlens[n]; }
  __host__ __device__ std::int64_t segments() const { return (length + kSegment - 1) / kSegment; }  // of a line
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
  std::int64_t line, index, begin, end, channel;

  __device__ __forceinline__ Where(const Call& call, int each) {
    // In 32 bits: 2^32 threads would have 2^37 elements, and a division of 64 bits is a call that spills.
    const std::uint32_t item = blockIdx.x * kThreads + threadIdx.x;
    const auto vectors = static_cast<std::uint32_t>(call.channels / each);
    const auto segments = static_cast<std::uint32_t>(call.segments());
    const std::uint32_t above = item / vectors;
    channel = std::int64_t{item - above * vectors} * each;
    line = above / segments;
    index = above % segments;
    begin = index * kSegment;
    end = begin + kSegment < call.length ? begin + kSegment : call.length;
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
__global__ void __launch_bounds__(kThreads) forward_kernel(Call call, Lines<T> x, Lines<T> y, float* final_state) {
  flashgla::cuda::wait_for_previous();
  const Where where(call, N);
  if (where.line >= call.lines) return;
  Place place = place_at(call, where.line, where.begin);
  float previous[N], mu[M][N];
  load_previous(call, x, where, place, previous);
#pragma unroll
  for (int m = 0; m < M; ++m) unpack(Vector<float, N>::load(call.mu + m * call.channels + where.channel), mu[m]);
  for (std::int64_t first = where.begin; first < where.end; first += kTogether) {
    Vector<T, N> tokens[kTogether];
#pragma unroll
    for (int t = 0; t < kTogether; ++t) {
      tokens[t] = Vector<T, N>::zero();
      if (first + t < where.end) tokens[t] = Vector<T, N>::load(x.at(0, where.line, first + t, where.channel));
    }
#pragma unroll
    for (int t = 0; t < kTogether; ++t) {
      if (first + t >= where.end) break;
      if (first + t == place.end) {
        place = place_after(call, place, first + t);
        load_state(call, place, where.channel, previous);
      }
      float own[N];
      unpack(tokens[t], own);
#pragma unroll
      for (int m = 0; m < M; ++m) {
        float mixed[N];
#pragma unroll
        for (int i = 0; i < N; ++i) mixed[i] = fmaf(mu[m][i], own[i] - previous[i], previous[i]);
        Vector<T, N>::of(mixed).store(y.at(m, where.line, first + t, where.channel));
      }
#pragma unroll
      for (int i = 0; i < N; ++i) {
        previous[i] = own[i];
        if (final_state != nullptr && first + t + 1 == place.end) {
          final_state[place.n * call.channels + where.channel + i] = own[i];
        }
      }
    }
  }
}

// sums [lines * segments,M,D].
template <class T, int N, int M>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(Call call, Lines<T> x, Lines<T> dy, Lines<T> dx, float* sums) {
  flashgla::cuda::wait_for_previous();
  const Where where(call, N);
  if (where.line >= call.lines) return;
  Place place = place_at(call, where.line, where.begin);
  float previous[N], mu[M][N], dmu[M][N] = {};
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
  float* to = sums + (where.line * call.segments() + where.index) * M * call.channels + where.channel;
#pragma unroll
  for (int m = 0; m < M; ++m) Vector<float, N>::of(dmu[m]).store(to + m * call.channels);
}

Call call_of(const Inputs& in, const float* mu) {
  return {in.x.size(0),
          in.x.size(1),
          in.x.size(2),
          in.mu.size(0),
          sequences_of(in),
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

std::int64_t blocks_of(const Call& call, int each) {
  return (call.lines * call.segments() * (call.channels / each) + kThreads - 1) / kThreads;
}

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
    using Kernel = void (*)(Call, Lines<T>, Lines<T>, float*);
    constexpr Kernel kernels[kMostMixes] = {forward_kernel<T, N, 1>, forward_kernel<T, N, 2>, forward_kernel<T, N, 3>};
    ops::cuda::queue_kernel(context, "token_shift", kernels[call.mixes - 1], blocks_of(call, N), kThreads, 0, call,
                            Lines<T>(in.x), Lines<T>(out.y), static_cast<float*>(state.data));
  });
}

void cuda_backward(Context& context, const Inputs& in, const TensorView& dy, const InputGradients& to) {
  const ArenaScope scope(context.scratch());
  const float* mu = mixes_in_f32(context, in.mu);
  const Call call = call_of(in, mu);
  const TensorView sums =
      context.scratch().tensor({call.lines * call.segments(), in.mu.numel()}, DType::f32, "token_shift: sums");
  if (in.x.numel() == 0) return;
  if (!context.planning()) {
    with_type(mu, {&in.x, &dy, &to.dx}, [&](auto zero, auto each) {
      using T = decltype(zero);
      constexpr int N = decltype(each)::value;
      using Kernel = void (*)(Call, Lines<T>, Lines<T>, Lines<T>, float*);
      constexpr Kernel kernels[kMostMixes] = {backward_kernel<T, N, 1>, backward_kernel<T, N, 2>,
                                              backward_kernel<T, N, 3>};
      ops::cuda::queue_kernel(context, "token_shift", kernels[call.mixes - 1], blocks_of(call, N), kThreads, 0, call,
                              Lines<T>(in.x), Lines<T>(dy), Lines<T>(to.dx), static_cast<float*>(sums.data));
    });
  }
  elementwise::column_sum(context, sums, to.dmu.reshape(Shape({to.dmu.numel()})), true);
}

}  // namespace

const Implementation kCuda{
    "cuda", Device::Kind::cuda,
    [](const Problem& problem, const Architecture&) { return supports_f32_and_bf16({problem.dtype}); }, cuda_forward,
    cuda_backward};

}  // namespace flashgla::ops::token_shift
