// Forward, a block of threads holds two rows; backward, a team of them one, and the sums of dweight are those of fixed
// blocks of rows.
#include "flashgla/ops/cuda/rms_backward.cuh"
#include "flashgla/ops/cuda/rows_by_block.cuh"
#include "flashgla/ops/layer_norm/implementations.h"

namespace flashgla::ops::layer_norm {

namespace {

using ops::cuda::BlockRows;
using ops::cuda::Operand;
using ops::cuda::RowGrid;
using ops::cuda::Team;
using ops::cuda::Vector;

template <class T>
struct ForwardOperands {
  Operand<T> x, y;
  ops::cuda::WeightVector weight, bias;
  float *mean, *rstd;  // null: not wanted
  float epsilon;
};

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

constexpr int kForwardRows = 2;  // next to each other, at once: weight and bias are read once for both

template <int kHeld, int N, class W, class T>
__global__ void __launch_bounds__(BlockRows::kThreads) forward_kernel(ForwardOperands<T> t, BlockRows grid) {
  flashgla::cuda::release_next_of_waves();
  flashgla::cuda::wait_for_previous();
  constexpr int kRows = kForwardRows;
  __shared__ ops::cuda::SumsOfBlock<kRows> sums[2];
  const ops::cuda::RowsOfBlock<kRows, kHeld, N, T> held(t.x, grid);  // all loads before the first use
  if (held.count < 1) return;                                        // whole warps, and then there is no barrier
  Vector<W, N> weight[kHeld], bias[kHeld];
  float mean[kRows], r[kRows];
  ops::cuda::for_each_held<kHeld, N>(grid, [&](int i, int column) {
    weight[i] = t.weight.template packed<N, W>(column);
    bias[i] = t.bias.template packed<N, W>(column);
  });
  held.sum(
      grid, [](int, float x, float total) { return total + x; }, mean);
  sums[0].add_up(grid, mean);
#pragma unroll
  for (int k = 0; k < kRows; ++k) mean[k] *= grid.each;
  held.sum(
      grid, [&](int k, float x, float total) { return fmaf(x - mean[k], x - mean[k], total); }, r);
  sums[1].add_up(grid, r);
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    if (k >= held.count) break;
    r[k] = rsqrtf(fmaf(r[k], grid.each, t.epsilon));
    if (t.rstd && grid.rank() == 0) {
      t.mean[held.first + k] = mean[k];
      t.rstd[held.first + k] = r[k];
    }
    T* y = t.y.at(held.first + k, 0);
    ops::cuda::for_each_held<kHeld, N>(grid, [&](int i, int column) {
      float out[N];
#pragma unroll
      for (int j = 0; j < N; ++j) out[j] = fmaf((held.x[k][i][j] - mean[k]) * r[k], weight[i][j], bias[i][j]);
      Vector<T, N>::of(out).store(y + column);
    });
  }
}

// Rows that are too long to be held, or no whole vectors.
template <int N, class T>
__global__ void __launch_bounds__(RowGrid::kThreads) long_forward_kernel(ForwardOperands<T> t, RowGrid grid) {
  flashgla::cuda::wait_for_previous();
  __shared__ float2 shared[kTwoSums];
  const Team team(grid.team, &shared[0].x);
  const std::int64_t row = std::int64_t{blockIdx.x} * grid.teams() + team.index();
  if (row >= grid.rows) return;  // whole teams
  const T* x = t.x.at(row, 0);
  FirstOfRow<N, T> first;
  first.load(x, grid.length);
  const float from = first.mean(grid.length);
  float distances = 0.0f, squares = 0.0f;
  ops::cuda::for_each_vector<0, N>(grid, team.rank(), [&](int, std::int64_t column, bool whole) {
    add_distances<N>(ops::cuda::load_vector<N>(x, column, whole, grid.length), from, column, whole, grid.length,
                     distances, squares);
  });
  const Moments moments(from, sum_of_two(team, shared, distances, squares), 1.0f / static_cast<float>(grid.length),
                        t.epsilon);
  if (t.rstd && team.rank() == 0) {
    t.mean[row] = moments.mean;
    t.rstd[row] = moments.r;
  }
  T* y = t.y.at(row, 0);
  ops::cuda::for_each_vector<0, N>(grid, team.rank(), [&](int, std::int64_t column, bool whole) {
    const Vector<T, N> vector = ops::cuda::load_vector<N>(x, column, whole, grid.length);
    float weight[N], bias[N], out[N];
    t.weight.template load<N>(column, whole, grid.length, weight);
    t.bias.template load<N>(column, whole, grid.length, bias);
#pragma unroll
    for (int j = 0; j < N; ++j) out[j] = fmaf((vector[j] - moments.mean) * moments.r, weight[j], bias[j]);
    ops::cuda::store_vector<N>(y, column, whole, grid.length, Vector<T, N>::of(out));
  });
}

template <class T>
struct BackwardOperands {
  Operand<T> x, dy, dx;
  ops::cuda::WeightVector weight;
  const float *mean, *rstd;
  bool accumulate_dx, want_dweight;
};

// What a thread holds of one row.
template <int kHeld, int N, class T>
struct HeldRow {
  Vector<T, N> x[kHeld], dy[kHeld], before[kHeld];
  float r, mean;

  __device__ __forceinline__ void load(const BackwardOperands<T>& t, const RowGrid& grid, int rank, std::int64_t row) {
    const T* x_row = t.x.at(row, 0);
    const T* dy_row = t.dy.at(row, 0);
    const T* dx_row = t.dx.at(row, 0);
    ops::cuda::for_each_vector<kHeld, N>(grid, rank, [&](int i, std::int64_t column, bool whole) {
      x[i] = ops::cuda::load_vector<N>(x_row, column, whole, grid.length);
      dy[i] = ops::cuda::load_vector<N>(dy_row, column, whole, grid.length);  // 0 behind the row's end
      if (t.accumulate_dx) before[i] = ops::cuda::load_vector<N>(dx_row, column, whole, grid.length);
    });
    r = t.rstd[row];
    mean = t.mean[row];
  }
  __device__ __forceinline__ float product(int i, int j) const { return dy[i][j] * (x[i][j] - mean); }
};

// In kernels: an element's gradient from u = dy weight and x less its mean.
struct RowGradient {
  float r, mean_u, pull;
  __device__ __forceinline__ float of(float u, float centred) const { return (u - mean_u) * r - centred * pull; }
};

template <int kHeld, int N, class T>
__global__ void __launch_bounds__(RowGrid::kThreads)
    backward_kernel(BackwardOperands<T> t, RowGrid grid, ops::cuda::PartialSums partial) {
  flashgla::cuda::wait_for_previous();
  extern __shared__ float shared[];
  Team team(grid.team, shared);
  using Held = HeldRow<kHeld, N, T>;
  ops::cuda::rms_backward<kHeld, N, Held>(
      t, grid, partial, shared, team, [&](const Held& held, std::int64_t row, float pull, const auto& weight) {
        float total = 0.0f;
        ops::cuda::for_each_vector<kHeld, N>(grid, team.rank(), [&](int i, std::int64_t, bool) {
#pragma unroll
          for (int j = 0; j < N; ++j) total += held.dy[i][j] * weight[i][j];
        });
        const RowGradient gradient{held.r, team.sum(total) / static_cast<float>(grid.length), pull};
        T* dx_row = t.dx.at(row, 0);
        ops::cuda::for_each_vector<kHeld, N>(grid, team.rank(), [&](int i, std::int64_t column, bool whole) {
          float out[N];
#pragma unroll
          for (int j = 0; j < N; ++j) {
            out[j] = gradient.of(held.dy[i][j] * weight[i][j], held.x[i][j] - held.mean);
            if (t.accumulate_dx) out[j] += held.before[i][j];
          }
          ops::cuda::store_vector<N>(dx_row, column, whole, grid.length, Vector<T, N>::of(out));
        });
      });
}

// Rows too long to be held: dx alone.
template <int N, class T>
__global__ void __launch_bounds__(RowGrid::kThreads) long_rows_kernel(BackwardOperands<T> t, RowGrid grid) {
  flashgla::cuda::wait_for_previous();
  __shared__ float shared[RowGrid::kSharedFloats];
  Team team(grid.team, shared);
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * grid.teams() + team.index();
  if (row >= grid.rows) return;
  const T* x_row = t.x.at(row, 0);
  const T* dy_row = t.dy.at(row, 0);
  T* dx_row = t.dx.at(row, 0);
  const float r = t.rstd[row], mean = t.mean[row];
  float weight[N], total = 0.0f, dot = 0.0f;
  ops::cuda::for_each_vector<0, N>(grid, team.rank(), [&](int, std::int64_t column, bool whole) {
    const auto x = ops::cuda::load_vector<N>(x_row, column, whole, grid.length);
    const auto dy = ops::cuda::load_vector<N>(dy_row, column, whole, grid.length);
    t.weight.template load<N>(column, whole, grid.length, weight);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      total += dy[j] * weight[j];
      dot += dy[j] * weight[j] * (x[j] - mean);
    }
  });
  const auto length = static_cast<float>(grid.length);
  const float mean_u = team.sum(total) / length;
  const RowGradient gradient{r, mean_u, r * r * r * (team.sum(dot) / length)};
  ops::cuda::for_each_vector<0, N>(grid, team.rank(), [&](int, std::int64_t column, bool whole) {
    const auto x = ops::cuda::load_vector<N>(x_row, column, whole, grid.length);
    const auto dy = ops::cuda::load_vector<N>(dy_row, column, whole, grid.length);
    t.weight.template load<N>(column, whole, grid.length, weight);
    float out[N];
#pragma unroll
    for (int j = 0; j < N; ++j) out[j] = gradient.of(dy[j] * weight[j], x[j] - mean);
    if (t.accumulate_dx) {
      const auto before = ops::cuda::load_vector<N>(dx_row, column, whole, grid.length);
#pragma unroll
      for (int j = 0; j < N; ++j) out[j] += before[j];
    }
    ops::cuda::store_vector<N>(dx_row, column, whole, grid.length, Vector<T, N>::of(out));
  });
}

// dweight's sums of such rows: a thread takes a column.
template <class T>
__global__ void __launch_bounds__(RowGrid::kThreads)
    long_rows_dweight_kernel(BackwardOperands<T> t, ops::cuda::PartialSums partial, std::int64_t tiles) {
  flashgla::cuda::wait_for_previous();
  const std::int64_t block = blockIdx.x / tiles, column = blockIdx.x % tiles * RowGrid::kThreads + threadIdx.x;
  if (column >= partial.columns) return;
  float total = 0.0f;
#pragma unroll 4
  for (std::int64_t row = partial.begin(block); row < partial.end(block); ++row) {
    const float centred = flashgla::cuda::to_float(*t.x.at(row, column)) - t.mean[row];
    total += flashgla::cuda::to_float(*t.dy.at(row, column)) * centred * t.rstd[row];
  }
  partial.sums[block * partial.columns + column] = total;
}

template <int N, class T>
void forward_of(Context& context, const Inputs& inputs, const Outputs& outputs, double epsilon) {
  const TensorView& x = inputs.x;
  const ForwardOperands<T> operands{Operand<T>(x),
                                    Operand<T>(outputs.y),
                                    ops::cuda::weight_vector(inputs.weight, N),
                                    ops::cuda::weight_vector(inputs.bias, N),
                                    outputs.rstd ? outputs.mean.as<float>() : nullptr,
                                    outputs.rstd ? outputs.rstd.as<float>() : nullptr,
                                    static_cast<float>(epsilon)};
  const std::int64_t rows = rows_of(x.shape), length = x.size(-1);
  const BlockRows grid(rows, length, N, length % N == 0 && operands.weight.aligned && operands.bias.aligned);
  if (grid.held() > 0) {
    return ops::cuda::with_room(grid, operands.weight.wide, [&](auto held, auto weight) {
      ops::cuda::queue_kernel(context, "layer_norm", forward_kernel<held.value, N, decltype(weight), T>,
                              grid.blocks(kForwardRows), grid.threads(), 0, operands, grid);
    });
  }
  const RowGrid long_grid(rows, length, N);
  ops::cuda::queue_kernel(context, "layer_norm", long_forward_kernel<N, T>, long_grid.blocks(), RowGrid::kThreads, 0,
                          operands, long_grid);
}

template <int N, class T>
void backward_of(Context& context, const Gradients& g, const ops::cuda::PartialSums& partial) {
  const BackwardOperands<T> operands{
      Operand<T>(g.x),    Operand<T>(g.dy),   Operand<T>(g.dx), ops::cuda::weight_vector(g.weight, N),
      g.mean.as<float>(), g.rstd.as<float>(), g.accumulate_dx,  true};
  const RowGrid grid(rows_of(g.x.shape), g.x.size(-1), N);
  ops::cuda::with_held_vectors(grid, [&](auto held) {
    if constexpr (held.value > 0) {
      ops::cuda::queue_kernel(context, "layer_norm", backward_kernel<held.value, N, T>, partial.blocks(),
                              RowGrid::kThreads, ops::cuda::backward_shared<held.value, N>(grid), operands, grid,
                              partial);
    } else {
      const std::int64_t tiles = (grid.length + RowGrid::kThreads - 1) / RowGrid::kThreads;
      // Before dx, which may take dy's place.
      ops::cuda::queue_kernel(context, "layer_norm", long_rows_dweight_kernel<T>, partial.blocks() * tiles,
                              RowGrid::kThreads, 0, operands, partial, tiles);
      ops::cuda::queue_kernel(context, "layer_norm", long_rows_kernel<N, T>, grid.blocks(), RowGrid::kThreads, 0,
                              operands, grid);
    }
  });
}

using bf16 = __nv_bfloat16;

void cuda_forward(Context& context, const Inputs& inputs, const Outputs& outputs, double epsilon) {
  if (context.planning()) return;
  const auto aligned = [&](int elements) { return ops::cuda::are_aligned({&inputs.x, &outputs.y}, elements); };
  if (inputs.x.dtype == DType::f32) {
    return (aligned(4) ? forward_of<4, float> : forward_of<1, float>)(context, inputs, outputs, epsilon);
  }
  (aligned(8) ? forward_of<8, bf16> : forward_of<1, bf16>)(context, inputs, outputs, epsilon);
}

void cuda_backward(Context& context, const Gradients& g) {
  const ArenaScope scope(context.scratch());
  const auto partial = ops::cuda::take_sums_of_rows(context, g.x, "layer_norm: dweight");
  if (context.planning()) return;
  const auto aligned = [&](int elements) { return ops::cuda::are_aligned({&g.x, &g.dy, &g.dx}, elements); };
  const auto run = g.x.dtype == DType::f32 ? (aligned(4) ? backward_of<4, float> : backward_of<1, float>)
                                           : (aligned(8) ? backward_of<8, bf16> : backward_of<1, bf16>);
  run(context, g, partial);
  ops::cuda::reduce(context, partial, g.dweight.as<float>(), true);
}

}  // namespace

const Implementation kCuda{"cuda", Device::Kind::cuda,
                           [](const Problem& problem, const Architecture&) {
                             return supports_f32_and_bf16({problem.dtype, problem.weight_dtype});
                           },
                           cuda_forward, cuda_backward};

}  // namespace flashgla::ops::layer_norm
