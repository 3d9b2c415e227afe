// One pass over memory; a thread draws the bits of the elements that it has.
#include "flashgla/ops/cuda/each_element.cuh"
#include "flashgla/ops/dropout/implementations.h"
#include "flashgla/ops/dropout/mask.h"

namespace flashgla::ops::dropout {

namespace {

using ops::cuda::Operand;
using ops::cuda::Vector;

// All tensors are contiguous, so that they are one row and a column is the element's index.
template <class T, bool kSum>
struct Run {
  Operand<T> x, residual, out;
  Rule rule;
  float factor;

  template <int N>
  struct Read {
    Vector<T, N> x, residual;
  };
  template <int N>
  __device__ __forceinline__ Read<N> read(std::int64_t row, std::int64_t column) const {
    if constexpr (kSum) return {x.template load<N>(row, column), residual.template load<N>(row, column)};
    return {x.template load<N>(row, column), {}};
  }
  template <int N>
  __device__ __forceinline__ void write(std::int64_t row, std::int64_t column, const Read<N>& in) const {
    static_assert(kElementsPerDraw % N == 0, "columns are multiples of N");
    const random::Words words = rule.stream().words(static_cast<std::uint64_t>(column / kElementsPerDraw));
    const int first = static_cast<int>(column % kElementsPerDraw);
    float values[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float value = bits_of(words, first + i) >= rule.threshold ? in.x[i] * factor : 0.0f;
      values[i] = value;
      if constexpr (kSum) values[i] = in.residual[i] + value;
    }
    out.template store<N>(row, column, values);
  }
};

template <class T>
void run_in(Context& context, const TensorView& x, const TensorView& residual, const TensorView& out,
            const Rule& rule) {
  const auto factor = static_cast<float>(rule.factor());
  if (residual) {
    const Run<T, true> body{Operand<T>(x), Operand<T>(residual), Operand<T>(out), rule, factor};
    return ops::cuda::for_each_element(context, "dropout", body, {&x, &residual, &out});
  }
  const Run<T, false> body{Operand<T>(x), Operand<T>(x), Operand<T>(out), rule, factor};
  ops::cuda::for_each_element(context, "dropout", body, {&x, &out});
}

}  // namespace

const Implementation kCuda{
    "cuda", Device::Kind::cuda,
    [](const Problem& problem, const Architecture&) { return supports_f32_and_bf16({problem.dtype}); },
    [](Context& context, const TensorView& x, const TensorView& residual, const TensorView& out, const Mask& mask) {
      (x.dtype == DType::f32 ? run_in<float> : run_in<__nv_bfloat16>)(context, x, residual, out, Rule(mask));
    }};

}  // namespace flashgla::ops::dropout
