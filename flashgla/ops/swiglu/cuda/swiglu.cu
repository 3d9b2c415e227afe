// One pass over memory in either direction.
#include "flashgla/ops/cuda/each_element.cuh"
#include "flashgla/ops/cuda/math.cuh"
#include "flashgla/ops/swiglu/implementations.h"

namespace flashgla::ops::swiglu {

namespace {

using flashgla::cuda::DeviceElement;
using ops::cuda::Operand;
using ops::cuda::Vector;
using bf16 = __nv_bfloat16;

template <class T, class Y>
struct Forward {
  Operand<T> gate, up;
  Operand<Y> y;

  template <int N>
  struct Read {
    Vector<T, N> gate, up;
  };
  template <int N>
  __device__ __forceinline__ Read<N> read(std::int64_t row, std::int64_t column) const {
    return {gate.template load<N>(row, column), up.template load<N>(row, column)};
  }
  template <int N>
  __device__ __forceinline__ void write(std::int64_t row, std::int64_t column, const Read<N>& in) const {
    float out[N];
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = in.gate[i] * ops::cuda::sigmoid(in.gate[i]) * in.up[i];
    y.template store<N>(row, column, out);
  }
};

// kHidden: y is written again too.
template <class T, bool kHidden>
struct Backward {
  Operand<T> gate, up, dy, dgate, dup, y;

  template <int N>
  struct Read {
    Vector<T, N> gate, up, dy;
  };
  template <int N>
  __device__ __forceinline__ Read<N> read(std::int64_t row, std::int64_t column) const {
    return {gate.template load<N>(row, column), up.template load<N>(row, column), dy.template load<N>(row, column)};
  }
  template <int N>
  __device__ __forceinline__ void write(std::int64_t row, std::int64_t column, const Read<N>& in) const {
    float to_gate[N], to_up[N], hidden[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float g = in.gate[i], u = in.up[i], gradient = in.dy[i], s = ops::cuda::sigmoid(g);
      to_gate[i] = gradient * u * ops::cuda::silu_slope(g, s);
      to_up[i] = gradient * (g * s);
      hidden[i] = g * s * u;
    }
    dgate.template store<N>(row, column, to_gate);
    dup.template store<N>(row, column, to_up);
    if constexpr (kHidden) y.template store<N>(row, column, hidden);
  }
};

template <class T, class Y>
void forward_of(Context& context, const TensorView& gate, const TensorView& up, const TensorView& y) {
  const Forward<T, Y> body{Operand<T>(gate), Operand<T>(up), Operand<Y>(y)};
  ops::cuda::for_each_element(context, "swiglu", body, {&gate, &up, &y});
}

template <class T>
void backward_of(Context& context, const TensorView& gate, const TensorView& up, const TensorView& dy,
                 const TensorView& dgate, const TensorView& dup, const TensorView& y) {
  const Operand<T> operands[] = {Operand<T>(gate), Operand<T>(up), Operand<T>(dy), Operand<T>(dgate), Operand<T>(dup)};
  if (y) {
    const Backward<T, true> body{operands[0], operands[1], operands[2], operands[3], operands[4], Operand<T>(y)};
    return ops::cuda::for_each_element(context, "swiglu", body, {&gate, &up, &dy, &dgate, &dup, &y});
  }
  const Backward<T, false> body{operands[0], operands[1], operands[2], operands[3], operands[4], operands[4]};
  ops::cuda::for_each_element(context, "swiglu", body, {&gate, &up, &dy, &dgate, &dup});
}

}  // namespace

const Implementation kCuda{"cuda", Device::Kind::cuda,
                           [](const Problem& problem, const Architecture&) {
                             return supports_f32_and_bf16({problem.dtype, problem.y_dtype});
                           },
                           [](Context& context, const TensorView& gate, const TensorView& up, const TensorView& y) {
                             const auto run = gate.dtype != DType::f32 ? forward_of<bf16, bf16>
                                              : y.dtype != DType::f32  ? forward_of<float, bf16>
                                                                       : forward_of<float, float>;
                             run(context, gate, up, y);
                           },
                           [](Context& context, const TensorView& gate, const TensorView& up, const TensorView& dy,
                              const TensorView& dgate, const TensorView& dup, const TensorView& y) {
                             (gate.dtype == DType::f32 ? backward_of<float> : backward_of<bf16>)(context, gate, up, dy,
                                                                                                 dgate, dup, y);
                           }};

}  // namespace flashgla::ops::swiglu
