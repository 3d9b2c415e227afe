// Forward: a block has a few tokens, whose numbers a head lie in shared memory, and a thread the same channels of each.
// Backward, where neighbouring lanes have a vector each of a head: a thread has one vector of many tokens and what it
// sums over them (walking_backward_kernel). Else a block has a token, some neighbouring threads a head, and sums over
// the tokens come behind. 16 bytes a load where all lies so that a piece of it belongs to one head.
#include "flashgla/ops/cuda/each_element.cuh"
#include "flashgla/ops/cuda/math.cuh"
#include "flashgla/ops/cuda/partial_sums.cuh"
#include "flashgla/ops/state_space/cuda/convolved.h"
#include "flashgla/ops/state_space/cuda/gate_norm.h"
#include "flashgla/ops/state_space/cuda/softplus.cuh"
#include "flashgla/ops/state_space/implementations.h"
#include "flashgla/ops/weight_in_f32.h"

namespace flashgla::ops::state_space {

namespace {

using flashgla::cuda::from_float;
using flashgla::cuda::to_float;
using ops::cuda::Operand;
using ops::cuda::Vector;
using bf16 = __nv_bfloat16;

constexpr int kThreads = 256;

// Parameters in f32; bias null: zeros.
struct Parameters {
  const float *bias, *dt_bias, *a_log, *skip;
};

// Neighbouring channels of c with their biases.
template <int N, class T>
__device__ __forceinline__ void with_bias(float (&z)[N], const Vector<T, N>& c, const Parameters& p, std::int64_t at) {
  const auto bias = p.bias ? Vector<float, N>::load(p.bias + at) : Vector<float, N>::zero();
#pragma unroll
  for (int i = 0; i < N; ++i) z[i] = c[i] + bias[i];
}

constexpr int kTokens = 4;  // of a block of the forward

template <class T, int N>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(Operand<T> c, Operand<T> raw, Operand<T> u, Operand<T> v, Operand<float> g, Parameters p,
                   Sizes sizes, std::int64_t rows) {
  flashgla::cuda::wait_for_previous();
  extern __shared__ float dt[];  // [kTokens, H]
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kTokens;
  const int tokens = static_cast<int>(rows - first < kTokens ? rows - first : kTokens);
  const int heads = static_cast<int>(sizes.heads);
  for (int i = static_cast<int>(threadIdx.x); i < tokens * heads; i += kThreads) {
    const int token = i / heads, h = i - token * heads;
    dt[i] = softplus(to_float(*raw.at(first + token, h)) + p.dt_bias[h]);
    *g.at(first + token, h) = -expf(p.a_log[h]) * dt[i];
  }
  __syncthreads();
  const int channels = static_cast<int>(sizes.inner + 2 * sizes.states), value_dim = static_cast<int>(sizes.value_dim);
  for (int at = static_cast<int>(threadIdx.x) * N; at < channels; at += kThreads * N) {
    Vector<T, N> read[kTokens];
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
      if (token < tokens) read[token] = c.template load<N>(first + token, at);
    }
    const int h = at / value_dim;
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
      if (token >= tokens) break;
      float x[N];
      with_bias(x, read[token], p, at);
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] *= ops::cuda::sigmoid(x[i]);
      u.template store<N>(first + token, at, x);
      if (at >= sizes.inner) continue;
      const float step = dt[token * heads + h];
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] *= step;
      v.template store<N>(first + token, at, x);
    }
  }
}

template <class T>
struct Gradients {
  Operand<T> c, raw, dv, ds, dc, draw;
  Operand<float> dg;
  const T *dk, *dq;  // [rows,H,K]
};
struct OutOfHeads {
  Operand<float> ddt_bias, da_log, dskip;  // terms of the sums
};

// Where a row of them begins: worked out once, for the code that it takes where rows do not lie evenly is long.
template <class T>
struct GradientsRow {
  const T *c, *raw, *dv, *ds;
  T *dc, *draw;
  const float* dg;
  float *ddt_bias, *da_log, *dskip;
  __device__ __forceinline__ GradientsRow(const Gradients<T>& t, const OutOfHeads& terms, std::int64_t row)
      : c(t.c.at(row, 0)),
        raw(t.raw.at(row, 0)),
        dv(t.dv.at(row, 0)),
        ds(t.ds.at(row, 0)),
        dc(t.dc.at(row, 0)),
        draw(t.draw.at(row, 0)),
        dg(t.dg.at(row, 0)),
        ddt_bias(terms.ddt_bias.at(row, 0)),
        da_log(terms.da_log.at(row, 0)),
        dskip(terms.dskip.at(row, 0)) {}
};

// Over `lanes` neighbours, a power of two of at most 32.
__device__ __forceinline__ float sum_of_lanes(float x, int lanes) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

template <class T, int N>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(Gradients<T> t, OutOfHeads terms, Parameters p, Sizes sizes, KeyGradients keys, int lanes) {
  flashgla::cuda::wait_for_previous();
  const std::int64_t row = blockIdx.x;
  const GradientsRow<T> of(t, terms, row);
  const int lane = static_cast<int>(threadIdx.x) % lanes, value_dim = static_cast<int>(sizes.value_dim);
  // All threads go round equally often, for their sums are of whole warps.
#pragma unroll 2
  for (std::int64_t begin = 0; begin < sizes.heads; begin += kThreads / lanes) {
    const std::int64_t h = begin + threadIdx.x / lanes;
    const bool inside = h < sizes.heads;
    const float s = inside ? to_float(of.raw[h]) + p.dt_bias[h] : 0.0f, dt = softplus(s);
    const float beside = inside ? p.skip[h] : 0.0f;
    float to_dt = 0.0f, to_skip = 0.0f;
    for (int i = lane * N; inside && i < value_dim; i += lanes * N) {
      const std::int64_t at = h * value_dim + i;
      const auto to_v = Vector<T, N>::load(of.dv + at), to_s = Vector<T, N>::load(of.ds + at);
      float z[N];
      with_bias(z, Vector<T, N>::load(of.c + at), p, at);
#pragma unroll
      for (int e = 0; e < N; ++e) {
        const float sigmoid = ops::cuda::sigmoid(z[e]), x = z[e] * sigmoid;
        to_dt = fmaf(to_v[e], x, to_dt);
        to_skip = fmaf(to_s[e], x, to_skip);
        z[e] = fmaf(dt, to_v[e], beside * to_s[e]) * ops::cuda::silu_slope(z[e], sigmoid);
      }
      Vector<T, N>::of(z).store(of.dc + at);
    }
    to_dt = sum_of_lanes(to_dt, lanes);
    to_skip = sum_of_lanes(to_skip, lanes);
    if (inside && lane == 0) {
      const float A = -expf(p.a_log[h]), gradient = of.dg[h];
      const float to_raw = fmaf(A, gradient, to_dt) * ops::cuda::sigmoid(s);
      of.draw[h] = from_float<T>(to_raw);
      of.ddt_bias[h] = to_raw;
      of.da_log[h] = gradient * A * dt;
      of.dskip[h] = to_skip;
    }
  }
  const int states = static_cast<int>(sizes.states), key_dim = static_cast<int>(keys.key_dim);
  for (int i = static_cast<int>(threadIdx.x) * N; i < 2 * states; i += kThreads * N) {
    const int state = i < states ? i : i - states;
    const T* each = (i < states ? t.dk : t.dq) + (row * keys.rows + state / key_dim * keys.rows_a_group) * key_dim +
                    state % key_dim;
    float sum[N] = {}, z[N];
#pragma unroll 4
    for (std::int64_t h = 0; h < keys.rows_a_group; ++h) {
      const auto more = Vector<T, N>::load(each + h * key_dim);
#pragma unroll
      for (int e = 0; e < N; ++e) sum[e] += more[e];
    }
    with_bias(z, Vector<T, N>::load(of.c + sizes.inner + i), p, sizes.inner + i);
#pragma unroll
    for (int e = 0; e < N; ++e) sum[e] *= ops::cuda::silu_slope(z[e], ops::cuda::sigmoid(z[e]));
    Vector<T, N>::of(sum).store(of.dc + sizes.inner + i);
  }
}

constexpr int kWalkThreads = 64;
constexpr int kWalkBlocks = 10;  // that a multiprocessor holds

// Columns of the walk's sums: those of biases, where they are wanted, and three times the heads.
struct SumsOfWalk {
  float *dbias, *ddt_bias, *da_log, *dskip;
  std::int64_t biases, heads;

  __device__ __forceinline__ float* operator()(std::int64_t column) const {
    if (column < biases) return dbias + column;
    const std::int64_t i = column - biases;
    return i < heads ? ddt_bias + i : i < 2 * heads ? da_log + (i - heads) : dskip + (i - 2 * heads);
  }
};

// A block has kWalkThreads neighbouring vectors, of the channels of heads (`lanes` each) or of B and C, and walks over
// the tokens of one block of sums; the next token is asked for before one is worked on. Gradients of keys are sums over
// their heads, and rows lie evenly. What threads behind the last channel do counts for nothing.
template <class T>
__global__ void __launch_bounds__(kWalkThreads, kWalkBlocks)
    walking_backward_kernel(Gradients<T> t, Parameters p, Sizes sizes, int lanes, int slices,
                            ops::cuda::PartialSums sums) {
  constexpr int N = flashgla::cuda::kVectorOf<T>;
  using Channels = Vector<T, N>;
  flashgla::cuda::wait_for_previous();
  const int block = static_cast<int>(blockIdx.x) / slices, slice = static_cast<int>(blockIdx.x) - block * slices;
  const auto inner = static_cast<int>(sizes.inner), states = static_cast<int>(sizes.states),
             heads = static_cast<int>(sizes.heads), channels = inner + 2 * states;
  const int at = (slice * kWalkThreads + static_cast<int>(threadIdx.x)) * N;
  const bool there = at < channels, of_head = at < inner;
  const int h = of_head ? at / static_cast<int>(sizes.value_dim) : 0;
  const bool leads = of_head && (static_cast<int>(threadIdx.x) & (lanes - 1)) == 0;
  const int from = there ? at : 0, state = of_head || !there ? 0 : at - inner;
  const std::int64_t first = sums.begin(block), end = sums.end(block);

  const T *c = t.c.at(first, from), *raw = t.raw.at(first, h), *of_v, *of_s = t.ds.at(first, of_head ? at : 0);
  const float* dg = t.dg.at(first, h);
  T *dc = t.dc.at(first, from), *draw = t.draw.at(first, h);
  std::int64_t step_v = states;
  if (of_head) {
    of_v = t.dv.at(first, at);
    step_v = t.dv.rows.outer;
  } else {
    of_v = (state < states ? t.dk + state : t.dq + (state - states)) + first * states;
  }
  struct Read {
    Channels c, v, s;
    float raw, dg;
  };
  const auto read = [&] {
    Read x{Channels::load(c), Channels::load(of_v), of_head ? Channels::load(of_s) : Channels::zero(), to_float(*raw),
           leads ? *dg : 0.0f};
    c += t.c.rows.outer;
    of_v += step_v;
    of_s += t.ds.rows.outer;
    raw += t.raw.rows.outer;
    dg += t.dg.rows.outer;
    return x;
  };
  const float dt_bias = p.dt_bias[h], a = -expf(p.a_log[h]), beside = p.skip[h];
  float bias[N], dbias[N] = {}, ddt_bias = 0.0f, da_log = 0.0f, dskip = 0.0f;
#pragma unroll
  for (int e = 0; e < N; ++e) bias[e] = p.bias ? p.bias[from + e] : 0.0f;
  Read next = read();
  for (std::int64_t row = first; row < end; ++row) {
    const Read now = next;
    if (row + 1 < end) next = read();
    const float s = now.raw + dt_bias, dt = of_head ? softplus(s) : 1.0f;
    float z[N], to_dt = 0.0f, to_skip = 0.0f;
#pragma unroll
    for (int e = 0; e < N; ++e) {
      const float before = now.c[e] + bias[e], sigmoid = ops::cuda::sigmoid(before), x = before * sigmoid;
      to_dt = fmaf(now.v[e], x, to_dt);
      to_skip = fmaf(now.s[e], x, to_skip);
      z[e] = fmaf(dt, now.v[e], beside * now.s[e]) * ops::cuda::silu_slope(before, sigmoid);
      dbias[e] += z[e];
    }
    if (there) Vector<T, N>::of(z).store(dc);
    dc += t.dc.rows.outer;
    to_dt = sum_of_lanes(to_dt, lanes);
    to_skip = sum_of_lanes(to_skip, lanes);
    if (leads) {
      const float gradient = fmaf(a, now.dg, to_dt) * ops::cuda::sigmoid(s);
      *draw = from_float<T>(gradient);
      ddt_bias += gradient;
      da_log = fmaf(now.dg * a, dt, da_log);
      dskip += to_skip;
    }
    draw += t.draw.rows.outer;
  }
  float* const to = sums.sums + block * sums.columns;
  const std::int64_t biases = sums.columns - 3 * heads;
  if (there && biases > 0) {
#pragma unroll
    for (int e = 0; e < N; ++e) to[at + e] = dbias[e];
  }
  if (!leads) return;
  to[biases + h] = ddt_bias;
  to[biases + heads + h] = da_log;
  to[biases + 2 * heads + h] = dskip;
}

Parameters parameters_of(Context& context, const Inputs& in, const TensorView& skip) {
  const auto wide = [&](const TensorView& vector) {
    return vector ? weight_in_f32(context, vector, vector.numel()) : nullptr;
  };
  return {wide(in.bias), wide(in.dt_bias), wide(in.a_log), wide(skip)};
}

// Whether pieces of 16 bytes can be moved, each of one head, or of B or C.
template <class T>
bool in_pieces(const Parameters& p, const Sizes& sizes, std::initializer_list<const TensorView*> tensors) {
  constexpr int kElements = flashgla::cuda::kVectorOf<T>;
  return sizes.value_dim % kElements == 0 && sizes.states % kElements == 0 &&
         reinterpret_cast<std::uintptr_t>(p.bias) % 16 == 0 && ops::cuda::are_aligned(tensors, kElements);
}

void cuda_forward(Context& context, const Inputs& in, const Outputs& out) {
  const ArenaScope scope(context.scratch());
  const Parameters parameters = parameters_of(context, in, {});
  const std::int64_t rows = rows_of(in.c.shape);
  if (context.planning() || rows == 0) return;
  const Sizes sizes(out.v, in.c, in.raw.size(-1));
  const auto shared = static_cast<int>(kTokens * sizes.heads * static_cast<std::int64_t>(sizeof(float)));
  const auto queue = [&](auto zero) {
    using T = decltype(zero);
    auto* const kernel = in_pieces<T>(parameters, sizes, {&in.c, &out.u, &out.v})
                             ? forward_kernel<T, flashgla::cuda::kVectorOf<T>>
                             : forward_kernel<T, 1>;
    ops::cuda::queue_kernel(context, "state_space", kernel, (rows + kTokens - 1) / kTokens, kThreads, shared,
                            Operand<T>(in.c), Operand<T>(in.raw), Operand<T>(out.u), Operand<T>(out.v),
                            Operand<float>(out.g), parameters, sizes, rows);
  };
  in.c.dtype == DType::f32 ? queue(float{}) : queue(bf16{});
}

template <class T>
Gradients<T> gradients_of(const Inputs& in, const OutputGradients& from, const InputGradients& to) {
  return {Operand<T>(in.c),
          Operand<T>(in.raw),
          Operand<T>(from.dv),
          Operand<T>(from.ds),
          Operand<T>(to.dc),
          Operand<T>(to.draw),
          Operand<float>(from.dg),
          static_cast<const T*>(from.dk.data),
          static_cast<const T*>(from.dq.data)};
}

// Lanes that share a head in walking_backward_kernel; 0 where it cannot have such a call.
template <class T>
int walking_lanes(const Gradients<T>& t, const Sizes& sizes, const KeyGradients& keys, bool pieces) {
  constexpr int N = flashgla::cuda::kVectorOf<T>;
  const auto even = [](const auto&... operands) {
    return (... && (operands.rows.inner_count == 1 && operands.rows.middle_count == 1));
  };
  const std::int64_t lanes = sizes.value_dim / N;
  const bool fits = pieces && keys.rows_a_group == 1 && lanes <= flashgla::cuda::kWarp && (lanes & (lanes - 1)) == 0 &&
                    even(t.c, t.raw, t.dv, t.ds, t.dc, t.draw, t.dg);
  return fits ? static_cast<int>(lanes) : 0;
}

void cuda_backward(Context& context, const Inputs& in, const TensorView& skip, const OutputGradients& from,
                   const InputGradients& to) {
  const ArenaScope scope(context.scratch());
  const Parameters parameters = parameters_of(context, in, skip);
  const std::int64_t rows = rows_of(in.c.shape);
  const Sizes sizes(from.dv, in.c, in.raw.size(-1));
  const KeyGradients keys(from.dk, sizes);
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    constexpr int N = flashgla::cuda::kVectorOf<T>;
    const std::int64_t biases = to.dbias ? to.dbias.numel() : 0;
    const auto slices = static_cast<int>((in.c.size(-1) + kWalkThreads * N - 1) / (kWalkThreads * N));
    const std::int64_t most_blocks = std::max(1, context.architecture().multiprocessors * kWalkBlocks / slices);
    const auto sums = ops::cuda::take_partial_sums(context, rows, biases + 3 * sizes.heads, most_blocks, 1,
                                                   "state_space: sums of blocks of tokens");
    const HeadTerms terms(context, in.raw);
    if (context.planning() || rows == 0) return add_up(context, terms, to);
    const auto gradients = gradients_of<T>(in, from, to);
    const bool pieces = keys.key_dim % N == 0 &&
                        in_pieces<T>(parameters, sizes, {&in.c, &from.dv, &from.ds, &to.dc, &from.dk, &from.dq});
    if (const int lanes = walking_lanes(gradients, sizes, keys, pieces); lanes > 0) {
      ops::cuda::queue_kernel(context, "state_space", walking_backward_kernel<T>, sums.blocks() * slices, kWalkThreads,
                              0, gradients, parameters, sizes, lanes, slices, sums);
      const auto sum_of = [](const TensorView& vector) { return vector ? vector.as<float>() : nullptr; };
      return ops::cuda::reduce(
          context, sums,
          SumsOfWalk{sum_of(to.dbias), sum_of(to.ddt_bias), sum_of(to.da_log), sum_of(to.dskip), biases, sizes.heads},
          true);
    }
    int lanes = 1;
    while (lanes < 32 && lanes * (pieces ? N : 1) < sizes.value_dim) lanes *= 2;
    auto* const kernel = pieces ? backward_kernel<T, N> : backward_kernel<T, 1>;
    ops::cuda::queue_kernel(
        context, "state_space", kernel, rows, kThreads, 0, gradients,
        OutOfHeads{Operand<float>(terms.ddt_bias), Operand<float>(terms.da_log), Operand<float>(terms.dskip)},
        parameters, sizes, keys, lanes);
    add_up(context, terms, to);
  };
  in.c.dtype == DType::f32 ? run(float{}) : run(bf16{});
}

}  // namespace

const Implementation kCuda{
    "cuda",
    Device::Kind::cuda,
    [](const Problem& problem, const Architecture&) { return supports_f32_and_bf16({problem.dtype}); },
    cuda_forward,
    cuda_backward,
    cuda::gate_norm,
    cuda::gate_norm_backward,
    cuda::convolved_forward,
    cuda::convolved_backward};

}  // namespace flashgla::ops::state_space
