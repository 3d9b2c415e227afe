// Forward, a block of threads holds a row; backward, a team of them, and the sums of dweight are those of fixed blocks
// of rows.
#include "flashgla/ops/cuda/norm_backward.cuh"
#include "flashgla/ops/cuda/norm_forward.cuh"
#include "flashgla/ops/rms_norm/implementations.h"

namespace flashgla::ops::rms_norm {

namespace {

using ops::cuda::BlockRows;
using ops::cuda::Operand;
using ops::cuda::RowGrid;
using ops::cuda::Team;
using ops::cuda::Vector;

template <class T>
struct Forward {
  static constexpr int kRows = 1;
  Operand<T> x, y;
  ops::cuda::WeightVector weight;
  float* rstd;  // null: not wanted
  float epsilon;

  template <int kHeld, int N, class W>
  __device__ __forceinline__ void held_rows(const BlockRows& grid) const {
    __shared__ ops::cuda::SumsOfBlock<1> sums;
    const ops::cuda::RowsOfBlock<1, kHeld, N, T> held(x, grid);  // all loads before the first use
    if (held.count < 1) return;                                  // whole warps, and then there is no barrier
    Vector<W, N> weights[kHeld];
    float r[1];
    ops::cuda::for_each_held<kHeld, N>(grid,
                                       [&](int i, int column) { weights[i] = weight.template packed<N, W>(column); });
    held.sum(
        grid, [](int, float element, float total) { return fmaf(element, element, total); }, r);
    sums.add_up(grid, r);
    r[0] = rsqrtf(fmaf(r[0], grid.each, epsilon));
    if (rstd && grid.rank() == 0) rstd[held.first] = r[0];
    T* y_row = y.at(held.first, 0);
    ops::cuda::for_each_held<kHeld, N>(grid, [&](int i, int column) {
      float out[N];
#pragma unroll
      for (int j = 0; j < N; ++j) out[j] = held.x[0][i][j] * r[0] * weights[i][j];
      Vector<T, N>::of(out).store(y_row + column);
    });
  }

  template <int N>
  __device__ __forceinline__ void long_row(std::int64_t row, const RowGrid& grid, Team& team) const {
    const T* x_row = x.at(row, 0);
    T* y_row = y.at(row, 0);
    const float r = ops::cuda::inverse_rms<N>(x_row, grid, team, epsilon);
    if (rstd && team.rank() == 0) rstd[row] = r;
    ops::cuda::for_each_vector<0, N>(grid, team.rank(), [&](int, std::int64_t column, bool whole) {
      const auto vector = ops::cuda::load_vector<N>(x_row, column, whole, grid.length);
      float weights[N], out[N];
      weight.template load<N>(column, whole, grid.length, weights);
#pragma unroll
      for (int j = 0; j < N; ++j) out[j] = vector[j] * r * weights[j];
      ops::cuda::store_vector<N>(y_row, column, whole, grid.length, Vector<T, N>::of(out));
    });
  }
};

void cuda_forward(Context& context, const Inputs& inputs, const Outputs& outputs, double epsilon) {
  if (context.planning()) return;
  const TensorView &x = inputs.x, &y = outputs.y;
  ops::cuda::with_vectors(x.dtype, {&x, &y}, [&](auto element, auto elements) {
    using T = decltype(element);
    constexpr int N = elements.value;
    const Forward<T> norm{Operand<T>(x), Operand<T>(y), ops::cuda::weight_vector(inputs.weight, N),
                          outputs.rstd ? outputs.rstd.as<float>() : nullptr, static_cast<float>(epsilon)};
    ops::cuda::queue_norm_forward<N>(context, "rms_norm", norm, x, norm.weight.aligned);
  });
}

void cuda_backward(Context& context, const TensorView& x, const TensorView& weight, const TensorView& rstd,
                   const TensorView& dy, const TensorView& dx, bool accumulate_dx, const TensorView& dweight) {
  const ArenaScope scope(context.scratch());
  const auto partial = ops::cuda::take_sums_of_rows(context, x, "rms_norm: dweight");
  if (context.planning()) return;
  ops::cuda::with_vectors(x.dtype, {&x, &dy, &dx}, [&](auto element, auto elements) {
    using T = decltype(element);
    constexpr int N = elements.value;
    const ops::cuda::NormBackward<T, false> norm{Operand<T>(x),
                                                 Operand<T>(dy),
                                                 Operand<T>(dx),
                                                 ops::cuda::weight_vector(weight, N),
                                                 {rstd.as<float>()},
                                                 accumulate_dx,
                                                 static_cast<bool>(dweight)};
    ops::cuda::queue_norm_backward<N>(context, "rms_norm", norm, partial);
  });
  if (dweight) ops::cuda::reduce(context, partial, dweight.as<float>(), true);
}

}  // namespace

const Implementation kCuda{"cuda", Device::Kind::cuda,
                           [](const Problem& problem, const Architecture&) {
                             return supports_f32_and_bf16({problem.dtype, problem.weight_dtype});
                           },
                           cuda_forward, cuda_backward};

}  // namespace flashgla::ops::rms_norm
