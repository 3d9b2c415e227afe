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

template <class T>
struct Forward {
  Operand<T> x, g, k;
  float scale;

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
    float gates[N], keys[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      gates[i] = ops::cuda::log_sigmoid(in.x[i]) * scale;
      keys[i] = ops::cuda::one_less_exp(gates[i]);
    }
    g.template store<N>(row, column, gates);
    k.template store<N>(row, column, keys);
  }
};

// A thread takes the same channels of kRows rows, whose bounds most often are the same.
constexpr int kThreads = 256, kRows = 4;

template <class T>
struct BoundedForward {
  Operand<T> x, g, k;
  Operand<float> bound;
  bool of_channels;  // bounds are the same in every row
  std::int64_t rows;
  std::uint32_t vectors_each;  // of a row
  float scale;
};

// log(1 + y) for y >= 0, to 3e-7 of it, or to 2^-16 where the result has 8 bits: a bf16 kernel would else have more
// instructions than time for them.
template <class T>
__device__ __forceinline__ float log_of_one_and_more(float y) {
  if constexpr (sizeof(T) == 2) {
    float log2;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log2) : "f"(1.0f + y));
    return y < 0.03125f ? y * fmaf(y, fmaf(y, 0.333333f, -0.5f), 1.0f) : log2 * 0.69314718f;
  } else {
    return ops::cuda::log_of_one_and_more(y);
  }
}

template <int N, class T>
__global__ void __launch_bounds__(kThreads, 4) bounded_forward_kernel(const BoundedForward<T> t) {
  flashgla::cuda::release_next_of_waves();
  flashgla::cuda::wait_for_previous();
  const std::uint32_t item = blockIdx.x * kThreads + threadIdx.x, group = item / t.vectors_each;
  const std::int64_t column = std::int64_t{item - group * t.vectors_each} * N, first = std::int64_t{group} * kRows;
  if (first >= t.rows) return;
  Vector<T, N> x[kRows];
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    if (first + row < t.rows) x[row] = t.x.template load<N>(first + row, column);
  }
  Vector<float, N> bound = t.bound.template load<N>(first, column);
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    if (first + row >= t.rows) break;
    if (row > 0 && !t.of_channels) bound = t.bound.template load<N>(first + row, column);
    float gates[N], keys[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      // As in Bounded, with one division for y, which is one less than 1 / gate, and for 1 - gate.
      const float b = bound[i], u = ops::cuda::power_of_two(-kLog2OfE * fabsf(x[row][i]));
      const bool positive = x[row][i] >= 0.0f;
      const float share = (1.0f - b) * (positive ? u : 1.0f), whole = 1.0f + u;
      const float below = fmaf(b, positive ? u : 1.0f, positive ? 1.0f : u);
      float each;
      asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(each) : "f"(below * whole));
      gates[i] = -log_of_one_and_more<T>(share * (each * whole));
      keys[i] = share * (each * below);
    }
    if (t.scale != 1.0f) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        gates[i] *= t.scale;
        keys[i] = ops::cuda::one_less_exp(gates[i]);
      }
    }
    t.g.template store<N>(first + row, column, gates);
    t.k.template store<N>(first + row, column, keys);
  }
}

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

template <class T>
void forward_of(Context& context, const TensorView& x, const TensorView& bound, const TensorView& g,
                const TensorView& k, float scale) {
  if (!bound) {
    return ops::cuda::for_each_element(context, "forget_gate",
                                       Forward<T>{Operand<T>(x), Operand<T>(g), Operand<T>(k), scale}, {&x, &g, &k});
  }
  if (x.numel() == 0) return;
  constexpr int kWide = flashgla::cuda::kVectorOf<T>;
  const bool wide = x.size(-1) % kWide == 0 && ops::cuda::are_aligned({&x, &bound, &g, &k}, kWide);
  const std::int64_t rows = rows_of(x.shape), each = x.size(-1) / (wide ? kWide : 1);
  const std::int64_t items = (rows + kRows - 1) / kRows * each;
  if (items > 0x7fffffff) throw Error("forget_gate: too large for one launch");
  bool of_channels = true;
  for (int dim = 0; dim + 1 < bound.rank(); ++dim) of_channels &= bound.size(dim) == 1 || bound.stride[dim] == 0;
  const BoundedForward<T> operands{Operand<T>(x),
                                   Operand<T>(g),
                                   Operand<T>(k),
                                   Operand<float>(bound),
                                   of_channels,
                                   rows,
                                   static_cast<std::uint32_t>(each),
                                   scale};
  ops::cuda::queue_kernel(context, "forget_gate",
                          wide ? bounded_forward_kernel<kWide, T> : bounded_forward_kernel<1, T>,
                          (items + kThreads - 1) / kThreads, kThreads, 0, operands);
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
  (x.dtype == DType::f32 ? forward_of<float> : forward_of<bf16>)(context, x, bound, g, k,
                                                                 static_cast<float>(1.0 / normalizer));
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
