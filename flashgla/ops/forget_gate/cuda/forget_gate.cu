// One pass over memory in either direction.
#include "flashgla/ops/cuda/each_element.cuh"
#include "flashgla/ops/cuda/math.cuh"
#include "flashgla/ops/forget_gate/implementations.h"

namespace flashgla::ops::forget_gate {

namespace {

using ops::cuda::Operand;
using ops::cuda::Vector;

constexpr float kLog2OfE = 1.44269504f;

// What of a bounded gate is of x alone, or of x and b: as in reference.cpp.
struct Bounded {
  float open, of_bound, share, log_gate;

  __device__ __forceinline__ Bounded(float x, float b) {
    const float u = ops::cuda::power_of_two(-kLog2OfE * fabsf(x)),
                below = __fdividef(1.0f, x >= 0.0f ? fmaf(b, u, 1.0f) : b + u);
    of_bound = (x >= 0.0f ? u : 1.0f) * below;
    share = (1.0f - b) * (x >= 0.0f ? 1.0f : u) * below;
    open = __fdividef(x >= 0.0f ? u : 1.0f, 1.0f + u);
    log_gate = -ops::cuda::log_of_one_and_more((1.0f - b) * of_bound);
  }
};

// kBounded: else the bound is 0, and its operand is x's, not read.
template <class T, bool kBounded>
struct Forward {
  Operand<T> x;
  Operand<float> bound;
  Operand<T> g, k;
  float scale;

  template <int N>
  struct Read {
    Vector<T, N> x;
    Vector<float, N> bound;
  };
  template <int N>
  __device__ __forceinline__ Read<N> read(std::int64_t row, std::int64_t column) const {
    Read<N> in;
    in.x = x.template load<N>(row, column);
    if constexpr (kBounded) in.bound = bound.template load<N>(row, column);
    return in;
  }
  template <int N>
  __device__ __forceinline__ void write(std::int64_t row, std::int64_t column, const Read<N>& in) const {
    float gates[N], keys[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if constexpr (kBounded) {
        gates[i] = Bounded(in.x[i], in.bound[i]).log_gate * scale;
      } else {
        gates[i] = ops::cuda::log_sigmoid(in.x[i]) * scale;
      }
      keys[i] = ops::cuda::one_less_exp(gates[i]);
    }
    g.template store<N>(row, column, gates);
    k.template store<N>(row, column, keys);
  }
};

template <class T, bool kBounded>
struct Backward {
  Operand<T> x;
  Operand<float> bound;
  Operand<T> dg, dk, dx;
  Operand<float> dbound;
  float scale;

  template <int N>
  struct Read {
    Vector<T, N> x, dg, dk;
    Vector<float, N> bound;
  };
  template <int N>
  __device__ __forceinline__ Read<N> read(std::int64_t row, std::int64_t column) const {
    Read<N> in;
    in.x = x.template load<N>(row, column);
    in.dg = dg.template load<N>(row, column);
    in.dk = dk.template load<N>(row, column);
    if constexpr (kBounded) in.bound = bound.template load<N>(row, column);
    return in;
  }
  template <int N>
  __device__ __forceinline__ void write(std::int64_t row, std::int64_t column, const Read<N>& in) const {
    float to_x[N], to_bound[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const auto of_gate = [&](float log_gate) {
        return (in.dg[i] - ops::cuda::power_of_two(kLog2OfE * scale * log_gate) * in.dk[i]) * scale;
      };
      if constexpr (kBounded) {
        const Bounded gate(in.x[i], in.bound[i]);
        const float gradient = of_gate(gate.log_gate);
        to_x[i] = gradient * gate.open * gate.share;
        to_bound[i] = gradient * gate.of_bound;
      } else {
        to_x[i] = of_gate(ops::cuda::log_sigmoid(in.x[i])) * ops::cuda::sigmoid(-in.x[i]);
      }
    }
    dx.template store<N>(row, column, to_x);
    if constexpr (kBounded) dbound.template store<N>(row, column, to_bound);
  }
};

template <class T, bool kBounded>
void forward_of(Context& context, const TensorView& x, const TensorView& bound, const TensorView& g,
                const TensorView& k, float scale) {
  const TensorView& b = kBounded ? bound : x;
  const Forward<T, kBounded> body{Operand<T>(x), Operand<float>(b), Operand<T>(g), Operand<T>(k), scale};
  ops::cuda::for_each_element(context, "forget_gate", body, {&x, &b, &g, &k});
}

template <class T, bool kBounded>
void backward_of(Context& context, const TensorView& x, const TensorView& bound, const TensorView& dg,
                 const TensorView& dk, const TensorView& dx, const TensorView& dbound, float scale) {
  const TensorView &b = kBounded ? bound : x, &db = kBounded ? dbound : x;
  const Backward<T, kBounded> body{Operand<T>(x),  Operand<float>(b),  Operand<T>(dg), Operand<T>(dk),
                                   Operand<T>(dx), Operand<float>(db), scale};
  ops::cuda::for_each_element(context, "forget_gate", body, {&x, &b, &dg, &dk, &dx, &db});
}

using bf16 = __nv_bfloat16;

void cuda_forward(Context& context, const TensorView& x, const TensorView& bound, const TensorView& g,
                  const TensorView& k, double normalizer) {
  const auto run = x.dtype == DType::f32 ? (bound ? forward_of<float, true> : forward_of<float, false>)
                                         : (bound ? forward_of<bf16, true> : forward_of<bf16, false>);
  run(context, x, bound, g, k, static_cast<float>(1.0 / normalizer));
}

void cuda_backward(Context& context, const TensorView& x, const TensorView& bound, const TensorView& dg,
                   const TensorView& dk, const TensorView& dx, const TensorView& dbound, double normalizer) {
  const auto run = x.dtype == DType::f32 ? (bound ? backward_of<float, true> : backward_of<float, false>)
                                         : (bound ? backward_of<bf16, true> : backward_of<bf16, false>);
  run(context, x, bound, dg, dk, dx, dbound, static_cast<float>(1.0 / normalizer));
}

}  // namespace

const Implementation kCuda{
    "cuda", Device::Kind::cuda,
    [](const Problem& problem, const Architecture&) { return supports_f32_and_bf16({problem.dtype}); }, cuda_forward,
    cuda_backward};

}  // namespace flashgla::ops::forget_gate
