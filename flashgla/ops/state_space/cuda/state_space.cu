// A block has a token: what is one number a head lies in shared memory, channels are neighbouring threads'; sums over a
// head's channels are a warp's.
#include "flashgla/ops/cuda/each_element.cuh"
#include "flashgla/ops/cuda/math.cuh"
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

__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

template <class T>
__device__ __forceinline__ float with_bias(const T* c, const Parameters& p, std::int64_t i) {
  return to_float(c[i]) + (p.bias ? p.bias[i] : 0.0f);
}

template <class T>
__global__ void __launch_bounds__(kThreads) forward_kernel(Operand<T> c, Operand<T> raw, Operand<T> u, Operand<T> v,
                                                           Operand<float> g, Parameters p, Sizes sizes) {
  flashgla::cuda::wait_for_previous();
  extern __shared__ float dt[];  // [H]
  const std::int64_t row = blockIdx.x;
  for (std::int64_t h = threadIdx.x; h < sizes.heads; h += kThreads) {
    dt[h] = softplus(to_float(*raw.at(row, h)) + p.dt_bias[h]);
    *g.at(row, h) = -expf(p.a_log[h]) * dt[h];
  }
  __syncthreads();
  const T* from = c.at(row, 0);
  T *to = u.at(row, 0), *values = v.at(row, 0);
  for (std::int64_t i = threadIdx.x; i < sizes.inner + 2 * sizes.states; i += kThreads) {
    const float z = with_bias(from, p, i), x = z * ops::cuda::sigmoid(z);
    to[i] = from_float<T>(x);
    if (i < sizes.inner) values[i] = from_float<T>(dt[i / sizes.value_dim] * x);
  }
}

template <class T>
struct Gradients {
  Operand<T> c, raw, dv, ds, dc, draw;
  Operand<float> dg, da_log, dskip;
  const T *dk, *dq;  // [rows,H,K]
};

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

template <class T>
__global__ void __launch_bounds__(kThreads) backward_kernel(Gradients<T> t, Parameters p, Sizes sizes) {
  flashgla::cuda::wait_for_previous();
  const std::int64_t row = blockIdx.x;
  const int lane = threadIdx.x % 32;
  const T *c = t.c.at(row, 0), *dv = t.dv.at(row, 0), *ds = t.ds.at(row, 0);
  T* dc = t.dc.at(row, 0);
  for (std::int64_t h = threadIdx.x / 32; h < sizes.heads; h += kThreads / 32) {
    const float s = to_float(*t.raw.at(row, h)) + p.dt_bias[h], dt = softplus(s);
    const float beside = p.skip[h];
    float to_dt = 0.0f, to_skip = 0.0f;
    for (std::int64_t i = h * sizes.value_dim + lane; i < (h + 1) * sizes.value_dim; i += 32) {
      const float z = with_bias(c, p, i), sigmoid = ops::cuda::sigmoid(z), x = z * sigmoid;
      const float to_v = to_float(dv[i]), to_s = to_float(ds[i]);
      to_dt = fmaf(to_v, x, to_dt);
      to_skip = fmaf(to_s, x, to_skip);
      dc[i] = from_float<T>(fmaf(dt, to_v, beside * to_s) * ops::cuda::silu_slope(z, sigmoid));
    }
    to_dt = sum_of_warp(to_dt);
    to_skip = sum_of_warp(to_skip);
    if (lane == 0) {
      const float A = -expf(p.a_log[h]), gradient = *t.dg.at(row, h);
      *t.draw.at(row, h) = from_float<T>(fmaf(A, gradient, to_dt) * ops::cuda::sigmoid(s));
      *t.da_log.at(row, h) = gradient * A * dt;
      *t.dskip.at(row, h) = to_skip;
    }
  }
  const std::int64_t group = sizes.heads_a_group();
  for (std::int64_t i = threadIdx.x; i < 2 * sizes.states; i += kThreads) {
    const std::int64_t state = i % sizes.states, first = state / sizes.key_dim * group;
    const T* each =
        (i < sizes.states ? t.dk : t.dq) + (row * sizes.heads + first) * sizes.key_dim + state % sizes.key_dim;
    float sum = 0.0f;
#pragma unroll 8
    for (std::int64_t h = 0; h < group; ++h) sum += to_float(each[h * sizes.key_dim]);
    const float z = with_bias(c, p, sizes.inner + i);
    dc[sizes.inner + i] = from_float<T>(sum * ops::cuda::silu_slope(z, ops::cuda::sigmoid(z)));
  }
}

// y = (o + skip x) silu(z). Where all tensors are dense a column counts over all rows.
template <class T>
struct Gate {
  Operand<T> o, x, z, y;
  const float* skip;
  std::uint32_t inner, value_dim;

  template <int N>
  struct Read {
    Vector<T, N> o, x, z;
  };
  template <int N>
  __device__ __forceinline__ Read<N> read(std::int64_t row, std::int64_t column) const {
    return {o.template load<N>(row, column), x.template load<N>(row, column), z.template load<N>(row, column)};
  }
  template <int N>
  __device__ __forceinline__ void write(std::int64_t row, std::int64_t column, const Read<N>& in) const {
    float out[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const auto channel = static_cast<std::uint32_t>((column + i) % inner);
      out[i] = fmaf(skip[channel / value_dim], in.x[i], in.o[i]) * in.z[i] * ops::cuda::sigmoid(in.z[i]);
    }
    y.template store<N>(row, column, out);
  }
};

template <class T>
struct GateBackward {
  Operand<T> o, x, z, dy, ds, dz;
  const float* skip;
  std::uint32_t inner, value_dim;

  template <int N>
  struct Read {
    Vector<T, N> o, x, z, dy;
  };
  template <int N>
  __device__ __forceinline__ Read<N> read(std::int64_t row, std::int64_t column) const {
    return {o.template load<N>(row, column), x.template load<N>(row, column), z.template load<N>(row, column),
            dy.template load<N>(row, column)};
  }
  template <int N>
  __device__ __forceinline__ void write(std::int64_t row, std::int64_t column, const Read<N>& in) const {
    float to_s[N], to_z[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const auto channel = static_cast<std::uint32_t>((column + i) % inner);
      const float z = in.z[i], sigmoid = ops::cuda::sigmoid(z), gradient = in.dy[i];
      to_s[i] = gradient * z * sigmoid;
      to_z[i] = gradient * fmaf(skip[channel / value_dim], in.x[i], in.o[i]) * ops::cuda::silu_slope(z, sigmoid);
    }
    ds.template store<N>(row, column, to_s);
    dz.template store<N>(row, column, to_z);
  }
};

Parameters parameters_of(Context& context, const Inputs& in, const TensorView& skip) {
  const auto wide = [&](const TensorView& vector) {
    return vector ? weight_in_f32(context, vector, vector.numel()) : nullptr;
  };
  return {wide(in.bias), wide(in.dt_bias), wide(in.a_log), wide(skip)};
}

void cuda_forward(Context& context, const Inputs& in, const Outputs& out) {
  const ArenaScope scope(context.scratch());
  const Parameters parameters = parameters_of(context, in, {});
  const std::int64_t rows = rows_of(in.c.shape);
  if (context.planning() || rows == 0) return;
  const Sizes sizes(out.v, in.c, in.raw.size(-1), 1);
  const auto shared = static_cast<int>(sizes.heads * static_cast<std::int64_t>(sizeof(float)));
  const auto queue = [&](auto zero) {
    using T = decltype(zero);
    ops::cuda::queue_kernel(context, "state_space", forward_kernel<T>, rows, kThreads, shared, Operand<T>(in.c),
                            Operand<T>(in.raw), Operand<T>(out.u), Operand<T>(out.v), Operand<float>(out.g), parameters,
                            sizes);
  };
  in.c.dtype == DType::f32 ? queue(float{}) : queue(bf16{});
}

void cuda_backward(Context& context, const Inputs& in, const TensorView& skip, const OutputGradients& from,
                   const InputGradients& to) {
  const ArenaScope scope(context.scratch());
  const Parameters parameters = parameters_of(context, in, skip);
  const std::int64_t rows = rows_of(in.c.shape);
  if (context.planning() || rows == 0) return;
  const Sizes sizes(from.dv, in.c, in.raw.size(-1), from.dk.size(-1));
  const auto queue = [&](auto zero) {
    using T = decltype(zero);
    const Gradients<T> gradients{Operand<T>(in.c),
                                 Operand<T>(in.raw),
                                 Operand<T>(from.dv),
                                 Operand<T>(from.ds),
                                 Operand<T>(to.dc),
                                 Operand<T>(to.draw),
                                 Operand<float>(from.dg),
                                 Operand<float>(to.da_log),
                                 Operand<float>(to.dskip),
                                 static_cast<const T*>(from.dk.data),
                                 static_cast<const T*>(from.dq.data)};
    ops::cuda::queue_kernel(context, "state_space", backward_kernel<T>, rows, kThreads, 0, gradients, parameters,
                            sizes);
  };
  in.c.dtype == DType::f32 ? queue(float{}) : queue(bf16{});
}

void cuda_gate(Context& context, const TensorView& o, const TensorView& x, const TensorView& skip, const TensorView& z,
               const TensorView& y) {
  const ArenaScope scope(context.scratch());
  const float* factors = weight_in_f32(context, skip, skip.numel());
  if (context.planning()) return;
  const auto inner = static_cast<std::uint32_t>(o.size(-1)), heads = static_cast<std::uint32_t>(skip.numel());
  const auto queue = [&](auto zero) {
    using T = decltype(zero);
    const Gate<T> body{Operand<T>(o), Operand<T>(x), Operand<T>(z), Operand<T>(y), factors, inner, inner / heads};
    ops::cuda::for_each_element(context, "state_space", body, {&o, &x, &z, &y});
  };
  o.dtype == DType::f32 ? queue(float{}) : queue(bf16{});
}

void cuda_gate_backward(Context& context, const TensorView& o, const TensorView& x, const TensorView& skip,
                        const TensorView& z, const TensorView& dy, const TensorView& ds, const TensorView& dz) {
  const ArenaScope scope(context.scratch());
  const float* factors = weight_in_f32(context, skip, skip.numel());
  if (context.planning()) return;
  const auto inner = static_cast<std::uint32_t>(o.size(-1)), heads = static_cast<std::uint32_t>(skip.numel());
  const auto queue = [&](auto zero) {
    using T = decltype(zero);
    const GateBackward<T> body{Operand<T>(o),  Operand<T>(x), Operand<T>(z), Operand<T>(dy), Operand<T>(ds),
                               Operand<T>(dz), factors,       inner,         inner / heads};
    ops::cuda::for_each_element(context, "state_space", body, {&o, &x, &z, &dy, &ds, &dz});
  };
  o.dtype == DType::f32 ? queue(float{}) : queue(bf16{});
}

}  // namespace

const Implementation kCuda{
    "cuda",
    Device::Kind::cuda,
    [](const Problem& problem, const Architecture&) { return supports_f32_and_bf16({problem.dtype}); },
    cuda_forward,
    cuda_backward,
    cuda_gate,
    cuda_gate_backward};

}  // namespace flashgla::ops::state_space
