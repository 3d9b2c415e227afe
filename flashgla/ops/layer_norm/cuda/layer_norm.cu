// Forward, a block of threads holds two rows; backward, a team of them one, and the sums of dweight are those of fixed
// blocks of rows.
#include "flashgla/ops/cuda/norm_backward.cuh"
#include "flashgla/ops/cuda/norm_forward.cuh"
#include "flashgla/ops/layer_norm/implementations.h"

namespace flashgla::ops::layer_norm {

namespace {

using ops::cuda::BlockRows;
using ops::cuda::Operand;
using ops::cuda::RowGrid;
using ops::cuda::Team;
using ops::cuda::Vector;

// Two sums at once over a team's threads. shared: kTwoSums.
constexpr int kTwoSums = RowGrid::kThreads / flashgla::cuda::kWarp;
__device__ __forceinline__ float2 sum_of_two(const Team& team, float2* shared, float first, float second) {
  using flashgla::cuda::kWarp;
  const float2 own = make_float2(flashgla::cuda::warp_sum(first), flashgla::cuda::warp_sum(second));
  const int warps = team.threads() / kWarp;
  if (warps == 1) return own;
  float2* sums = shared + team.index() * warps;
  if (team.rank() % kWarp == 0) sums[team.rank() / kWarp] = own;
  asm volatile("bar.sync %0, %1;" ::"r"(team.index() + 1), "r"(team.threads()) : "memory");
  float2 total = sums[0];
  for (int i = 1; i < warps; ++i) total.x += sums[i].x, total.y += sums[i].y;
  return total;
}

// A row's first eight elements. Mean and variance are found from sums of what each element is away from their mean, and
// of the squares of that. Since the square of its distance from the row's mean is at most an eighth of the sum of all
// such squares, the sum is at most 1 + length / 8 times what is wanted of it: no more digits are lost, whatever the
// row.
template <int N, class T>
struct FirstOfRow {
  static constexpr int kCount = 8;
  Vector<T, N> held[kCount / N];

  __device__ __forceinline__ void load(const T* row, std::int64_t length) {
#pragma unroll
    for (int i = 0; i < kCount / N; ++i) {
      held[i] = ops::cuda::load_vector<N>(row, i * N, i * N + N <= length, length);
    }
  }
  __device__ __forceinline__ float mean(std::int64_t length) const {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount / N; ++i) {
#pragma unroll
      for (int j = 0; j < N; ++j) total += held[i][j];
    }
    return length >= kCount ? total * (1.0f / kCount) : total / static_cast<float>(length);
  }
};

// What a thread adds to the two sums of a vector.
template <int N, class T>
__device__ __forceinline__ void add_distances(const Vector<T, N>& vector, float from, int count, float& first,
                                              float& second) {
#pragma unroll
  for (int j = 0; j < N; ++j) {
    if (j >= count) break;
    const float distance = vector[j] - from;
    first += distance;
    second = fmaf(distance, distance, second);
  }
}
template <int N, class T>
__device__ __forceinline__ void add_distances(const Vector<T, N>& vector, float from, std::int64_t column, bool whole,
                                              std::int64_t length, float& first, float& second) {
  if (whole) {
    add_distances<N>(vector, from, N, first, second);
  } else {
    add_distances<N>(vector, from, static_cast<int>(length - column), first, second);
  }
}

struct Moments {
  float mean, r;

  __device__ __forceinline__ Moments(float from, float2 sums, float each, float epsilon) {
    const float distance = sums.x * each;
    mean = from + distance;
    r = rsqrtf(fmaxf(fmaf(-distance, distance, sums.y * each), 0.0f) + epsilon);
  }
};

template <class T>
struct Forward {
  static constexpr int kRows = 2;
  Operand<T> x, y;
  ops::cuda::WeightVector weight, bias;
  float *mean, *rstd;  // null: not wanted
  float epsilon;

  template <int kHeld, int N, class W>
  __device__ __forceinline__ void held_rows(const BlockRows& grid) const {
    __shared__ ops::cuda::SumsOfBlock<kRows> sums[2];
    const ops::cuda::RowsOfBlock<kRows, kHeld, N, T> held(x, grid);  // all loads before the first use
    if (held.count < 1) return;                                      // whole warps, and then there is no barrier
    Vector<W, N> weights[kHeld], biases[kHeld];
    float m[kRows], r[kRows];
    ops::cuda::for_each_held<kHeld, N>(grid, [&](int i, int column) {
      weights[i] = weight.template packed<N, W>(column);
      biases[i] = bias.template packed<N, W>(column);
    });
    held.sum(
        grid, [](int, float element, float total) { return total + element; }, m);
    sums[0].add_up(grid, m);
#pragma unroll
    for (int k = 0; k < kRows; ++k) m[k] *= grid.each;
    held.sum(
        grid, [&](int k, float element, float total) { return fmaf(element - m[k], element - m[k], total); }, r);
    sums[1].add_up(grid, r);
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      if (k >= held.count) break;
      r[k] = rsqrtf(fmaf(r[k], grid.each, epsilon));
      if (rstd && grid.rank() == 0) {
        mean[held.first + k] = m[k];
        rstd[held.first + k] = r[k];
      }
      T* y_row = y.at(held.first + k, 0);
      ops::cuda::for_each_held<kHeld, N>(grid, [&](int i, int column) {
        float out[N];
#pragma unroll
        for (int j = 0; j < N; ++j) out[j] = fmaf((held.x[k][i][j] - m[k]) * r[k], weights[i][j], biases[i][j]);
        Vector<T, N>::of(out).store(y_row + column);
      });
    }
  }

  template <int N>
  __device__ __forceinline__ void long_row(std::int64_t row, const RowGrid& grid, Team& team) const {
    __shared__ float2 sums[kTwoSums];
    const T* x_row = x.at(row, 0);
    FirstOfRow<N, T> first;
    first.load(x_row, grid.length);
    const float from = first.mean(grid.length);
    float distances = 0.0f, squares = 0.0f;
    ops::cuda::for_each_vector<0, N>(grid, team.rank(), [&](int, std::int64_t column, bool whole) {
      add_distances<N>(ops::cuda::load_vector<N>(x_row, column, whole, grid.length), from, column, whole, grid.length,
                       distances, squares);
    });
    const Moments moments(from, sum_of_two(team, sums, distances, squares), 1.0f / static_cast<float>(grid.length),
                          epsilon);
    if (rstd && team.rank() == 0) {
      mean[row] = moments.mean;
      rstd[row] = moments.r;
    }
    T* y_row = y.at(row, 0);
    ops::cuda::for_each_vector<0, N>(grid, team.rank(), [&](int, std::int64_t column, bool whole) {
      const auto vector = ops::cuda::load_vector<N>(x_row, column, whole, grid.length);
      float weights[N], biases[N], out[N];
      weight.template load<N>(column, whole, grid.length, weights);
      bias.template load<N>(column, whole, grid.length, biases);
#pragma unroll
      for (int j = 0; j < N; ++j) out[j] = fmaf((vector[j] - moments.mean) * moments.r, weights[j], biases[j]);
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
    const Forward<T> norm{Operand<T>(x),
                          Operand<T>(y),
                          ops::cuda::weight_vector(inputs.weight, N),
                          ops::cuda::weight_vector(inputs.bias, N),
                          outputs.rstd ? outputs.mean.as<float>() : nullptr,
                          outputs.rstd ? outputs.rstd.as<float>() : nullptr,
                          static_cast<float>(epsilon)};
    ops::cuda::queue_norm_forward<N>(context, "layer_norm", norm, x, norm.weight.aligned && norm.bias.aligned);
  });
}

void cuda_backward(Context& context, const Gradients& g) {
  const ArenaScope scope(context.scratch());
  const auto partial = ops::cuda::take_sums_of_rows(context, g.x, "layer_norm: dweight");
  if (context.planning()) return;
  ops::cuda::with_vectors(g.x.dtype, {&g.x, &g.dy, &g.dx}, [&](auto element, auto elements) {
    using T = decltype(element);
    constexpr int N = elements.value;
    const ops::cuda::NormBackward<T, true> norm{Operand<T>(g.x),
                                                Operand<T>(g.dy),
                                                Operand<T>(g.dx),
                                                ops::cuda::weight_vector(g.weight, N),
                                                {g.mean.as<float>(), g.rstd.as<float>()},
                                                g.accumulate_dx,
                                                true};
    ops::cuda::queue_norm_backward<N>(context, "layer_norm", norm, partial);
  });
  ops::cuda::reduce(context, partial, g.dweight.as<float>(), true);
}

}  // namespace

const Implementation kCuda{"cuda", Device::Kind::cuda,
                           [](const Problem& problem, const Architecture&) {
                             return supports_f32_and_bf16({problem.dtype, problem.weight_dtype});
                           },
                           cuda_forward, cuda_backward};

}  // namespace flashgla::ops::layer_norm
