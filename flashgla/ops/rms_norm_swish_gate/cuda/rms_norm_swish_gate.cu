// Forward, a block of threads, or a warp, holds two rows; backward, a team of them one, and the sums of dweight are
// those of fixed blocks of rows.
#include "flashgla/ops/cuda/math.cuh"
#include "flashgla/ops/cuda/norm_backward.cuh"
#include "flashgla/ops/cuda/norm_forward.cuh"
#include "flashgla/ops/rms_norm_swish_gate/implementations.h"

namespace flashgla::ops::rms_norm_swish_gate {

namespace {

using ops::cuda::BlockRows;
using ops::cuda::Operand;
using ops::cuda::RowGrid;
using ops::cuda::Team;
using ops::cuda::Vector;

template <class T>
struct Forward {
  static constexpr int kRows = 2;
  Operand<T> x, gate, y;
  ops::cuda::WeightVector weight;
  float* rstd;  // null: not wanted
  float epsilon;

  template <int kHeld, int N, class W>
  __device__ __forceinline__ void held_rows(const BlockRows& grid) const {
    __shared__ ops::cuda::SumsOfBlock<kRows> sums;
    using Rows = ops::cuda::RowsOfBlock<kRows, kHeld, N, T>;
    const Rows held(x, grid), gates(gate, grid);  // all loads before the first use
    if (held.count < 1) return;                   // whole warps, and then there is no barrier
    Vector<W, N> weights[kHeld];
    float r[kRows];
    ops::cuda::for_each_held<kHeld, N>(grid,
                                       [&](int i, int column) { weights[i] = weight.template packed<N, W>(column); });
    held.sum(
        grid, [](int, float element, float total) { return fmaf(element, element, total); }, r);
    sums.add_up(grid, r);
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      if (k >= held.count) break;
      r[k] = rsqrtf(fmaf(r[k], grid.each, epsilon));
      if (rstd && grid.rank() == 0) rstd[held.first + k] = r[k];
      T* y_row = y.at(held.first + k, 0);
      ops::cuda::for_each_held<kHeld, N>(grid, [&](int i, int column) {
        float out[N];
#pragma unroll
        for (int j = 0; j < N; ++j) {
          const float z = gates.x[k][i][j];
          out[j] = held.x[k][i][j] * r[k] * weights[i][j] * (z * ops::cuda::sigmoid(z));
        }
        Vector<T, N>::of(out).store(y_row + column);
      });
    }
  }

  template <int N>
  __device__ __forceinline__ void long_row(std::int64_t row, const RowGrid& grid, Team& team) const {
    const T* x_row = x.at(row, 0);
    const T* gate_row = gate.at(row, 0);
    T* y_row = y.at(row, 0);
    const float r = ops::cuda::inverse_rms<N>(x_row, grid, team, epsilon);
    if (rstd && team.rank() == 0) rstd[row] = r;
    ops::cuda::for_each_vector<0, N>(grid, team.rank(), [&](int, std::int64_t column, bool whole) {
      const auto vector = ops::cuda::load_vector<N>(x_row, column, whole, grid.length);
      const auto z = ops::cuda::load_vector<N>(gate_row, column, whole, grid.length);
      float weights[N], out[N];
      weight.template load<N>(column, whole, grid.length, weights);
#pragma unroll
      for (int j = 0; j < N; ++j) out[j] = vector[j] * r * weights[j] * (z[j] * ops::cuda::sigmoid(z[j]));
      ops::cuda::store_vector<N>(y_row, column, whole, grid.length, Vector<T, N>::of(out));
    });
  }
};

template <class T>
struct Backward {
  static constexpr bool kCentred = false, kWholeRows = true;
  Operand<T> x, gate, dy, dx, dgate;
  ops::cuda::WeightVector weight;
  const float* rstd;
  bool want_dweight;

  struct Row {
    const T *x, *gate, *dy;
    T *dx, *dgate;
  };
  __device__ __forceinline__ Row row(std::int64_t i) const {
    return {x.at(i, 0), gate.at(i, 0), dy.at(i, 0), dx.at(i, 0), dgate.at(i, 0)};
  }

  // Of WholeRows sigmoids are kept, which are else made twice.
  template <int kHeld, int N, bool kWhole>
  struct Held {
    Vector<T, N> x[kHeld], gate[kHeld], dy[kHeld];
    float r, kept[kWhole ? kHeld : 1][N];

    __device__ __forceinline__ void load(const Backward&, const Row& from, int i, std::int64_t column, bool whole,
                                         std::int64_t length) {
      x[i] = ops::cuda::load_vector<N>(from.x, column, whole, length);
      gate[i] = ops::cuda::load_vector<N>(from.gate, column, whole, length);
      dy[i] = ops::cuda::load_vector<N>(from.dy, column, whole, length);
    }
    __device__ __forceinline__ void load_statistics(const Backward& t, std::int64_t row) { r = t.rstd[row]; }
    __device__ __forceinline__ float product(int i, int j) {
      const float z = gate[i][j], s = ops::cuda::sigmoid(z), own = x[i][j];
      if constexpr (kWhole) kept[i][j] = s;
      return dy[i][j] * (z * s) * own;
    }
    __device__ __forceinline__ float weighted(int i, int j, float w) { return product(i, j) * w; }
    template <class Weight>
    __device__ __forceinline__ void write(const Backward&, const Row& to, int i, std::int64_t column, bool whole,
                                          std::int64_t length, const Weight& weight, float pull, float) const {
      const auto& weights = weight[i];
      float to_x[N], to_gate[N];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float z = gate[i][j], s = sigmoid(i, j), u = dy[i][j] * weights[j] * r;
        to_x[j] = u * (z * s) - x[i][j] * pull;
        to_gate[j] = u * x[i][j] * ops::cuda::silu_slope(z, s);
      }
      ops::cuda::store_vector<N>(to.dx, column, whole, length, Vector<T, N>::of(to_x));
      ops::cuda::store_vector<N>(to.dgate, column, whole, length, Vector<T, N>::of(to_gate));
    }

   private:
    __device__ __forceinline__ float sigmoid(int i, int j) const {
      if constexpr (kWhole) return kept[i][j];
      return ops::cuda::sigmoid(gate[i][j]);
    }
  };
};

void cuda_forward(Context& context, const TensorView& x, const TensorView& gate, const TensorView& weight,
                  const TensorView& y, const TensorView& rstd, double epsilon) {
  if (context.planning()) return;
  ops::cuda::with_vectors(x.dtype, {&x, &gate, &y}, [&](auto element, auto elements) {
    using T = decltype(element);
    constexpr int N = elements.value;
    const Forward<T> norm{Operand<T>(x),
                          Operand<T>(gate),
                          Operand<T>(y),
                          ops::cuda::weight_vector(weight, N),
                          rstd ? rstd.as<float>() : nullptr,
                          static_cast<float>(epsilon)};
    ops::cuda::queue_norm_forward<N>(context, "rms_norm_swish_gate", norm, x, norm.weight.aligned);
  });
}

void cuda_backward(Context& context, const TensorView& x, const TensorView& gate, const TensorView& weight,
                   const TensorView& rstd, const TensorView& dy, const TensorView& dx, const TensorView& dgate,
                   const TensorView& dweight) {
  const ArenaScope scope(context.scratch());
  const auto partial = ops::cuda::take_sums_of_rows(context, x, "rms_norm_swish_gate: dweight");
  if (context.planning()) return;
  ops::cuda::with_vectors(x.dtype, {&x, &gate, &dy, &dx, &dgate}, [&](auto element, auto elements) {
    using T = decltype(element);
    constexpr int N = elements.value;
    const Backward<T> norm{Operand<T>(x),    Operand<T>(gate),          Operand<T>(dy),
                           Operand<T>(dx),   Operand<T>(dgate),         ops::cuda::weight_vector(weight, N),
                           rstd.as<float>(), static_cast<bool>(dweight)};
    ops::cuda::queue_norm_backward<N>(context, "rms_norm_swish_gate", norm, partial);
  });
  if (dweight) ops::cuda::reduce(context, partial, dweight.as<float>(), true);
}

}  // namespace

const Implementation kCuda{"cuda", Device::Kind::cuda,
                           [](const Problem& problem, const Architecture&) {
                             return supports_f32_and_bf16({problem.dtype, problem.weight_dtype});
                           },
                           cuda_forward, cuda_backward};

}  // namespace flashgla::ops::rms_norm_swish_gate
