// The convolution and state_space behind it in one pass each way, of bf16, heads of 64 channels and filters of width 4
// without states (walk.cuh). Backward a lane makes z again, holds the gradients of the last inputs, not yet complete,
// and sums over its chunk's tokens what parameters get; behind its chunk it goes on for the tokens that look back into
// it.
#include "flashgla/ops/cuda/each_element.cuh"
#include "flashgla/ops/cuda/partial_sums.cuh"
#include "flashgla/ops/state_space/cuda/convolved.h"
#include "flashgla/ops/state_space/cuda/walk.cuh"

namespace flashgla::ops::state_space::cuda {

namespace {

// Warps that a multiprocessor holds.
constexpr int kForwardWarps = 24, kBackwardWarps = 16;
// Groups of tokens under way or in use: three made the forward 9% slower.
constexpr int kGroups = 2;

struct ForwardTensors {
  Lines<const bf16> x, raw;
  Lines<bf16> u, v;
  Lines<float> g;
};

template <bool kPacked>
__global__ void __launch_bounds__(kThreads, kForwardWarps / kWarps)
    convolved_forward_kernel(Call call, ForwardTensors t) {
  flashgla::cuda::wait_for_previous();
  extern __shared__ __align__(16) unsigned char shared[];
  const Part part(call);
  const Ahead<1, kGroups> ahead{shared};
  const bf16* from = t.x.at(part.line, part.begin, part.at);
  const auto bring = [&](int group) {
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const int token = part.begin + group * kTogether + k;
      ahead.begin_copy(group, k, 0, from, part.there && token < part.end);
      from += t.x.token_stride;
    }
    ops::cuda::end_group();
  };
#pragma unroll
  for (int group = 0; group < kGroups; ++group) bring(group);

  const int first = part.begin + part.lane % kTogether;  // of the tokens whose steps this lane makes
  const bool gives_g = part.of_head && part.lane % kHeadLanes < kTogether;
  const bf16* raw = t.raw.at(part.line, first, part.h);
  float* g = t.g.at(part.line, first, part.h);
  const auto read = [&](int group) {
    const bool there = part.of_head && first + group * kTogether < part.end;
    const float value = there ? to_float(*raw) : 0.0f;
    raw += kTogether * t.raw.token_stride;
    return value;
  };
  float next = read(0);
  const float dt_bias = call.dt_bias.at(part.h), a = -expf(call.a_log.at(part.h));
  Convolving conv(call, t.x, part);
  [[maybe_unused]] Sequences sequences(call, part.begin, std::bool_constant<kPacked>());
  bf16 *u = t.u.at(part.line, part.begin, part.at), *v = t.v.at(part.line, part.begin, part.of_head ? part.at : 0);
  const int groups = (part.end - part.begin + kTogether - 1) / kTogether;
#pragma unroll 1
  for (int group = 0; group < groups; ++group) {
    ops::cuda::wait_for_groups_before<kGroups - 1>();
    const float now = next;
    next = read(group + 1);
    const float dt = softplus(now + dt_bias);
    if (gives_g && first + group * kTogether < part.end) *g = a * dt;
    g += kTogether * t.g.token_stride;
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const int token = part.begin + group * kTogether + k;
      const float step = __shfl_sync(0xffffffffu, dt, k, kHeadLanes);
      const Looks<kPacked> looks(sequences, call, token);
      const Channels input = ahead.read(group, k, 0);
      float x[kChannels], values[kChannels];
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        const float z = conv.convolved(looks, input[c], c);
        x[c] = z * -kLn2 * reciprocal(1.0f + ops::cuda::power_of_two(z));
        values[c] = x[c] * step;
        conv.advance(input[c], c);
      }
      if (part.there && token < part.end) {
        Channels::of(x).store(u);
        if (part.of_head) Channels::of(values).store(v);
      }
      u += t.u.token_stride;
      v += t.v.token_stride;
    }
    bring(group + kGroups);
  }
  ops::cuda::wait_for_groups_before<0>();  // nothing may come after the block's end
}

struct BackwardTensors {
  Lines<const bf16> x, raw, dv, ds;
  const bf16 *dk, *dq;  // [B,T,S]
  Lines<const float> dg;
  Lines<bf16> dx, draw;
};

// Columns of a chunk's sums: those of weights, of biases, where they are wanted, three times the heads, and up to three
// that nobody wants, so that all chunks' weights lie at multiples of 16 bytes.
struct SumsOfChunk {
  float *dweight, *dbias, *ddt_bias, *da_log, *dskip, *unwanted;
  std::int64_t weights, biases, heads;

  __device__ __forceinline__ float* operator()(std::int64_t column) const {
    if (column < weights) return dweight + column;
    std::int64_t i = column - weights;
    if (i < biases) return dbias + i;
    i -= biases;
    if (i >= 3 * heads) return unwanted + column;
    return i < heads ? ddt_bias + i : i < 2 * heads ? da_log + (i - heads) : dskip + (i - 2 * heads);
  }
};

// The sum over a head's lanes of each of four values: lane i has that of value i % 4.
__device__ __forceinline__ float sums_over_head(const float (&x)[kTogether], int lane) {
  static_assert(kTogether == 4 && kHeadLanes >= 4);
  const auto exchange = [](bool second, float low, float high, int distance) {
    return (second ? high : low) + __shfl_xor_sync(0xffffffffu, second ? low : high, distance);
  };
  const bool odd = lane % 2 != 0;
  float sum = exchange(lane / 2 % 2 != 0, exchange(odd, x[0], x[1], 1), exchange(odd, x[2], x[3], 1), 2);
#pragma unroll
  for (int distance = kTogether; distance < kHeadLanes; distance *= 2)
    sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  return sum;
}
// Over `lanes` neighbours.
template <int kLanes>
__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

template <bool kPacked>
__global__ void __launch_bounds__(kThreads, kBackwardWarps / kWarps)
    convolved_backward_kernel(Call call, BackwardTensors t, ops::cuda::PartialSums sums, std::int64_t biases) {
  flashgla::cuda::wait_for_previous();
  extern __shared__ __align__(16) unsigned char shared[];
  const Part part(call);
  const Ahead<3, kGroups> ahead{shared};
  // Groups of the chunk's tokens, and one of those that look back into it; none of them is there behind a line's end.
  const int groups = (part.end - part.begin + kTogether - 1) / kTogether + 1;
  const bf16 *from_x = t.x.at(part.line, part.begin, part.at), *from_v,
             *from_s = t.ds.at(part.line, part.begin, part.of_head ? part.at : 0);
  std::int64_t step_v = call.states;
  if (part.of_head) {
    from_v = t.dv.at(part.line, part.begin, part.at);
    step_v = t.dv.token_stride;
  } else {
    const std::int64_t row = std::int64_t{part.line} * call.length + part.begin;
    const int state = part.there ? part.at - call.inner : 0;
    from_v = (state < call.states ? t.dk + state : t.dq + (state - call.states)) + row * call.states;
  }
  const auto bring = [&](int group) {
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const bool there = part.there && group < groups && part.begin + group * kTogether + k < call.length;
      ahead.begin_copy(group, k, 0, from_x, there);
      ahead.begin_copy(group, k, 1, from_v, there);
      ahead.begin_copy(group, k, 2, from_s, there && part.of_head);
      from_x += t.x.token_stride;
      from_v += step_v;
      from_s += t.ds.token_stride;
    }
    ops::cuda::end_group();
  };
#pragma unroll
  for (int group = 0; group < kGroups; ++group) bring(group);

  const int first = part.begin + part.lane % kTogether;  // of the tokens whose steps this lane makes
  const bool leads = part.of_head && part.lane % kHeadLanes < kTogether;
  const bf16* raw = t.raw.at(part.line, first, part.h);
  bf16* draw = t.draw.at(part.line, first, part.h);
  struct OfStep {
    float raw, dg;
  };
  const auto read = [&](int group) {
    const bool there = part.of_head && first + group * kTogether < call.length;
    const OfStep value{there ? to_float(*raw) : 0.0f,
                       there ? *t.dg.at(part.line, first + group * kTogether, part.h) : 0.0f};
    raw += kTogether * t.raw.token_stride;
    return value;
  };
  OfStep next = read(0);
  const float dt_bias = call.dt_bias.at(part.h), a = -expf(call.a_log.at(part.h)), beside = call.skip.at(part.h);
  Convolving conv(call, t.x, part);
  [[maybe_unused]] Sequences sequences(call, part.begin, std::bool_constant<kPacked>());

  float pending[kPast][kChannels] = {};  // pending[j]: of dx at token - kPast + j
  float dweight[kWidth][kChannels] = {}, dbias[kChannels] = {}, ddt_bias = 0.0f, da_log = 0.0f, dskip = 0.0f;
  const auto store_sums = [&] {
    float* to = sums.sums + part.chunk * sums.columns;
    if (part.there) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        const float of_channel[kWidth] = {-kLog2OfE * dweight[0][c], -kLog2OfE * dweight[1][c],
                                          -kLog2OfE * dweight[2][c], -kLog2OfE * dweight[3][c]};
        flashgla::cuda::Vector<float, kWidth>::of(of_channel).store(to + (part.at + c) * kWidth);
      }
    }
    to += call.channels() * kWidth;
    if (part.there && biases > 0) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) to[part.at + c] = -kLog2OfE * dbias[c];
    }
    to += biases + part.h;
    const float of_dt = sum_of_lanes<kTogether>(ddt_bias), of_a = sum_of_lanes<kTogether>(da_log),
                of_skip = -kLn2 * sum_of_lanes<kHeadLanes>(dskip);
    if (!part.of_head || part.lane % kHeadLanes != 0) return;
    to[0] = of_dt;
    to[call.heads] = of_a;
    to[2 * call.heads] = of_skip;
  };
#pragma unroll 1
  for (int group = 0; group < groups; ++group) {
    if (group == groups - 1) store_sums();
    ops::cuda::wait_for_groups_before<kGroups - 1>();
    const OfStep now = next;
    next = read(group + 1);
    const float s = now.raw + dt_bias, dt = part.of_head ? softplus(s) : 1.0f;
    float to_dt[kTogether] = {};
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const int token = part.begin + group * kTogether + k;
      const float step = __shfl_sync(0xffffffffu, dt, k, kHeadLanes);
      const Looks<kPacked> looks(sequences, call, token);
      const Channels x = ahead.read(group, k, 0), to_v = ahead.read(group, k, 1), to_s = ahead.read(group, k, 2);
      float out[kChannels];
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        const float z = conv.convolved(looks, x[c], c), sigmoid = reciprocal(1.0f + ops::cuda::power_of_two(z));
        const float silu = z * sigmoid;  // -1 / ln(2) of it
        to_dt[k] = fmaf(to_v[c], silu, to_dt[k]);
        dskip = fmaf(to_s[c], silu, dskip);
        // -ln(2) of the gradient of what the convolution gave, so that the weights here times it are what inputs get.
        const float dz =
            fmaf(step, to_v[c], beside * to_s[c]) * sigmoid * fmaf(z, fmaf(sigmoid, -kLn2 * kLn2, kLn2 * kLn2), -kLn2);
        dbias[c] += dz;
        dweight[kPast][c] = fmaf(dz, x[c], dweight[kPast][c]);
        float back[kPast];
#pragma unroll
        for (int j = 0; j < kPast; ++j) {
          back[j] = looks.at(j, dz);
          dweight[j][c] = fmaf(back[j], conv.window[j][c], dweight[j][c]);
        }
        out[c] = fmaf(conv.weight[0][c], back[0], pending[0][c]);
#pragma unroll
        for (int j = 0; j + 1 < kPast; ++j) pending[j][c] = fmaf(conv.weight[j + 1][c], back[j + 1], pending[j + 1][c]);
        pending[kPast - 1][c] = conv.weight[kPast][c] * dz;
        conv.advance(x[c], c);
      }
      const int complete = token - kPast;
      if (part.there && complete >= part.begin && complete < part.end)
        Channels::of(out).store(t.dx.at(part.line, complete, part.at));
    }
    bring(group + kGroups);
    const float gradient = fmaf(a, now.dg, -kLn2 * sums_over_head(to_dt, part.lane)) * ops::cuda::sigmoid(s);
    if (leads && first + group * kTogether < part.end) *draw = flashgla::cuda::from_float<bf16>(gradient);
    draw += kTogether * t.draw.token_stride;
    ddt_bias += gradient;
    da_log = fmaf(now.dg * a, dt, da_log);
  }
  ops::cuda::wait_for_groups_before<0>();  // nothing may come after the block's end
}

// Whether the walks can have a call of such inputs.
bool fits(const Convolution& convolution, const Inputs& in, const Sizes& sizes) {
  const TensorView& x = convolution.x;
  return x.dtype == DType::bf16 && convolution.weight.size(1) == kWidth && !convolution.initial_state &&
         sizes.value_dim == kHeadChannels && sizes.states % kChannels == 0 &&
         ops::cuda::are_aligned({&convolution.weight, &in.bias, &x}, kChannels) && x.size(1) < 1 << 30 &&
         sizes.channels() < 1 << 24;
}

// Cut so that all its warps, but not many fewer than there is room for, run at once.
Call call_of(const Context& context, const Convolution& convolution, const Inputs& in, const TensorView& skip,
             const Sizes& sizes, int warps_each) {
  const TensorView& x = convolution.x;
  Call call{};
  call.lines = static_cast<int>(x.size(0)), call.length = static_cast<int>(x.size(1));
  call.inner = static_cast<int>(sizes.inner), call.states = static_cast<int>(sizes.states);
  call.heads = static_cast<int>(sizes.heads);
  call.sequences = convolution.cu_seqlens ? convolution.cu_seqlens.numel() - 1 : call.lines;
  call.cu_seqlens = convolution.cu_seqlens.data;
  call.wide_boundaries = convolution.cu_seqlens && convolution.cu_seqlens.dtype == DType::i64;
  call.weight = Parameter(convolution.weight), call.bias = Parameter(in.bias);
  call.dt_bias = Parameter(in.dt_bias), call.a_log = Parameter(in.a_log), call.skip = Parameter(skip);
  constexpr int kFewest = 32;  // tokens of a chunk
  const int warps = context.architecture().multiprocessors * warps_each;
  const auto pieces = [](int length, int size) { return (length + size - 1) / size; };
  const int most = std::max(1, warps / std::max(1, call.slices() * call.lines));
  call.chunk = std::max(kFewest, pieces(pieces(call.length, most), kTogether) * kTogether);
  call.chunks = std::max(1, pieces(call.length, call.chunk));
  return call;
}

}  // namespace

bool convolved_forward(Context& context, const Convolution& convolution, const Inputs& in, const Outputs& out,
                       const TensorView& final_state) {
  const Sizes sizes(out.v, convolution.x, in.raw.size(-1));
  if (final_state || !fits(convolution, in, sizes) || !ops::cuda::are_aligned({&out.u, &out.v}, kChannels))
    return false;
  if (context.planning() || convolution.x.numel() == 0) return true;
  const Call call = call_of(context, convolution, in, {}, sizes, kForwardWarps);
  const ForwardTensors tensors{Lines<const bf16>(convolution.x), Lines<const bf16>(in.raw), Lines<bf16>(out.u),
                               Lines<bf16>(out.v), Lines<float>(out.g)};
  ops::cuda::queue_kernel(context, "state_space",
                          call.cu_seqlens ? convolved_forward_kernel<true> : convolved_forward_kernel<false>,
                          call.blocks(), kThreads, Ahead<1, kGroups>::kBytes, call, tensors);
  return true;
}

bool convolved_backward(Context& context, const Convolution& convolution, const Inputs& in, const TensorView& skip,
                        const OutputGradients& from, const InputGradients& to, const TensorView& dweight) {
  const Sizes sizes(from.dv, convolution.x, in.raw.size(-1));
  const KeyGradients keys(from.dk, sizes);
  if (!fits(convolution, in, sizes) || keys.rows_a_group != 1 ||
      !ops::cuda::are_aligned({&from.dv, &from.ds, &from.dk, &from.dq, &to.dc}, kChannels)) {
    return false;
  }
  const ArenaScope scope(context.scratch());
  const Call call = call_of(context, convolution, in, skip, sizes, kBackwardWarps);
  const std::int64_t chunks = std::int64_t{call.lines} * call.chunks, biases = to.dbias ? to.dbias.numel() : 0;
  const std::int64_t columns = (dweight.numel() + biases + 3 * sizes.heads + 3) / 4 * 4;
  const auto sums = ops::cuda::take_partial_sums(context, chunks, columns, std::max<std::int64_t>(chunks, 1), 1,
                                                 "state_space: sums of chunks");
  if (context.planning() || convolution.x.numel() == 0) return true;
  const BackwardTensors tensors{Lines<const bf16>(convolution.x),
                                Lines<const bf16>(in.raw),
                                Lines<const bf16>(from.dv),
                                Lines<const bf16>(from.ds),
                                static_cast<const bf16*>(from.dk.data),
                                static_cast<const bf16*>(from.dq.data),
                                Lines<const float>(from.dg),
                                Lines<bf16>(to.dc),
                                Lines<bf16>(to.draw)};
  ops::cuda::queue_kernel(context, "state_space",
                          call.cu_seqlens ? convolved_backward_kernel<true> : convolved_backward_kernel<false>,
                          call.blocks(), kThreads, Ahead<3, kGroups>::kBytes, call, tensors, sums, biases);
  const auto sum_of = [](const TensorView& vector) { return vector ? vector.as<float>() : nullptr; };
  ops::cuda::reduce(context, sums,
                    SumsOfChunk{dweight.as<float>(), sum_of(to.dbias), sum_of(to.ddt_bias), sum_of(to.da_log),
                                sum_of(to.dskip), sums.sums, dweight.numel(), biases, sizes.heads},
                    true);
  return true;
}

}  // namespace flashgla::ops::state_space::cuda
