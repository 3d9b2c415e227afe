// One pass over memory in either direction.
#include "flashgla/ops/cuda/each_element.cuh"
#include "flashgla/ops/cuda/math.cuh"
#include "flashgla/ops/log_sigmoid_gate/implementations.h"

namespace flashgla::ops::log_sigmoid_gate {

namespace {

using ops::cuda::Operand;
using ops::cuda::Vector;

// The gate before its clamp.
__device__ __forceinline__ float gate_of(float x, float scale) { return ops::cuda::log_sigmoid(x) * scale; }

// x of T, g of G; scale = 1 / normalizer.
template <class T, class G>
struct Forward {
  Operand<T> x;
  Operand<G> g;
  float scale, clamp_min;

  template <int N>
  struct Read {
    Vector<T, N> x;
  };
  template <int N>
  __device__ __forceinline__ Read<N> read(std::int64_t row, std::int64_t column) const {
    return {x.template load<N>(row, column)};
  }
  template <int N>
  __device__ __forceinline__ void write(std::int64_t row, std::int64_t column, const Read<N>& in) const {
    float out[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float gate = gate_of(in.x[i], scale);
      out[i] = gate < clamp_min ? clamp_min : gate;  // NaN stays
    }
    g.template store<N>(row, column, out);
  }
};

template <class T, class G>
struct Backward {
  Operand<T> x;
  Operand<G> dg;
  Operand<T> dx;
  float scale, clamp_min;

  template <int N>
  struct Read {
    Vector<T, N> x;
    Vector<G, N> dg;
  };
  template <int N>
  __device__ __forceinline__ Read<N> read(std::int64_t row, std::int64_t column) const {
    return {x.template load<N>(row, column), dg.template load<N>(row, column)};
  }
  template <int N>
  __device__ __forceinline__ void write(std::int64_t row, std::int64_t column, const Read<N>& in) const {
    const bool clamps = clamp_min > -INFINITY;
    float out[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float slope = ops::cuda::sigmoid(-in.x[i]) * scale;
      out[i] = clamps && gate_of(in.x[i], scale) < clamp_min ? 0.0f : in.dg[i] * slope;
    }
    dx.template store<N>(row, column, out);
  }
};

template <class T, class G>
void forward_of(Context& context, const TensorView& x, const TensorView& g, double normalizer, double clamp_min) {
  const Forward<T, G> body{Operand<T>(x), Operand<G>(g), static_cast<float>(1.0 / normalizer),
                           static_cast<float>(clamp_min)};
  ops::cuda::for_each_element(context, "log_sigmoid_gate", body, {&x, &g});
}

template <class T, class G>
void backward_of(Context& context, const TensorView& x, const TensorView& dg, const TensorView& dx, double normalizer,
                 double clamp_min) {
  const Backward<T, G> body{Operand<T>(x), Operand<G>(dg), Operand<T>(dx), static_cast<float>(1.0 / normalizer),
                            static_cast<float>(clamp_min)};
  ops::cuda::for_each_element(context, "log_sigmoid_gate", body, {&x, &dg, &dx});
}

using bf16 = __nv_bfloat16;

void cuda_forward(Context& context, const TensorView& x, const TensorView& g, double normalizer, double clamp_min) {
  const auto run = x.dtype == DType::f32   ? forward_of<float, float>
                   : g.dtype == DType::f32 ? forward_of<bf16, float>
                                           : forward_of<bf16, bf16>;
  run(context, x, g, normalizer, clamp_min);
}

void cuda_backward(Context& context, const TensorView& x, const TensorView& dg, const TensorView& dx, double normalizer,
                   double clamp_min) {
  const auto run = x.dtype == DType::f32    ? backward_of<float, float>
                   : dg.dtype == DType::f32 ? backward_of<bf16, float>
                                            : backward_of<bf16, bf16>;
  run(context, x, dg, dx, normalizer, clamp_min);
}

}  // namespace

const Implementation kCuda{"cuda", Device::Kind::cuda,
                           [](const Problem& problem, const Architecture&) {
                             return supports_f32_and_bf16({problem.dtype, problem.gate_dtype});
                           },
                           cuda_forward, cuda_backward};

}  // namespace flashgla::ops::log_sigmoid_gate
