// Forward, a block of threads holds a row; backward, a team of them, and the sums of dweight are those of fixed blocks
// of rows.
#include "flashgla/ops/cuda/rms_backward.cuh"
#include "flashgla/ops/cuda/rows_by_block.cuh"
#include "flashgla/ops/rms_norm/implementations.h"

namespace flashgla::ops::rms_norm {

namespace {

using ops::cuda::BlockRows;
using ops::cuda::Operand;
using ops::cuda::RowGrid;
using ops::cuda::Team;
using ops::cuda::Vector;

template <class T>
struct ForwardOperands {
  Operand<T> x, y;
  ops::cuda::WeightVector weight;
  float* rstd;  // null: not wanted
  float epsilon;
};

template <int kHeld, int N, class W, class T>
__global__ void __launch_bounds__(BlockRows::kThreads) forward_kernel(ForwardOperands<T> t, BlockRows grid) {
  flashgla::cuda::release_next_of_waves();
  flashgla::cuda::wait_for_previous();
  __shared__ ops::cuda::SumsOfBlock<1> sums;
  const ops::cuda::RowsOfBlock<1, kHeld, N, T> held(t.x, grid);  // all loads before the first use
  if (held.count < 1) return;                                    // whole warps, and then there is no barrier
  Vector<W, N> weight[kHeld];
  float r[1];
  ops::cuda::for_each_held<kHeld, N>(grid,
                                     [&](int i, int column) { weight[i] = t.weight.template packed<N, W>(column); });
  held.sum(
      grid, [](int, float x, float total) { return fmaf(x, x, total); }, r);
  sums.add_up(grid, r);
  r[0] = rsqrtf(fmaf(r[0], grid.each, t.epsilon));
  if (t.rstd && grid.rank() == 0) t.rstd[held.first] = r[0];
  T* y = t.y.at(held.first, 0);
  ops::cuda::for_each_held<kHeld, N>(grid, [&](int i, int column) {
    float out[N];
#pragma unroll
    for (int j = 0; j < N; ++j) out[j] = held.x[0][i][j] * r[0] * weight[i][j];
    Vector<T, N>::of(out).store(y + column);
  });
}

// Rows that are too long to be held, or no whole vectors.
template <int N, class T>
__global__ void __launch_bounds__(RowGrid::kThreads) long_forward_kernel(ForwardOperands<T> t, RowGrid grid) {
  flashgla::cuda::release_next_of_waves();
  flashgla::cuda::wait_for_previous();
  __shared__ float shared[RowGrid::kSharedFloats];
  Team team(grid.team, shared);
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * grid.teams() + team.index();
  if (row >= grid.rows) return;  // whole teams
  const T* x = t.x.at(row, 0);
  T* y = t.y.at(row, 0);
  float squares = 0.0f;
  ops::cuda::for_each_vector<0, N>(grid, team.rank(), [&](int, std::int64_t column, bool whole) {
    const auto vector = ops::cuda::load_vector<N>(x, column, whole, grid.length);
#pragma unroll
    for (int j = 0; j < N; ++j) squares += vector[j] * vector[j];
  });
  const float r = rsqrtf(team.sum(squares) / static_cast<float>(grid.length) + t.epsilon);
  if (t.rstd && team.rank() == 0) t.rstd[row] = r;
  ops::cuda::for_each_vector<0, N>(grid, team.rank(), [&](int, std::int64_t column, bool whole) {
    const auto vector = ops::cuda::load_vector<N>(x, column, whole, grid.length);
    float weight[N], out[N];
    t.weight.template load<N>(column, whole, grid.length, weight);
#pragma unroll
    for (int j = 0; j < N; ++j) out[j] = vector[j] * r * weight[j];
    ops::cuda::store_vector<N>(y, column, whole, grid.length, Vector<T, N>::of(out));
  });
}

template <class T>
struct BackwardOperands {
  Operand<T> x, dy, dx;
  ops::cuda::WeightVector weight;
  const float* rstd;
  bool accumulate_dx, want_dweight;
};

// What a thread holds of one row.
template <int kHeld, int N, class T>
struct HeldRow {
  Vector<T, N> x[kHeld], dy[kHeld], before[kHeld];
  float r;

  __device__ __forceinline__ void load(const BackwardOperands<T>& t, const RowGrid& grid, int rank, std::int64_t row) {
    const T* x_row = t.x.at(row, 0);
    const T* dy_row = t.dy.at(row, 0);
    const T* dx_row = t.dx.at(row, 0);
    ops::cuda::for_each_vector<kHeld, N>(grid, rank, [&](int i, std::int64_t column, bool whole) {
      x[i] = ops::cuda::load_vector<N>(x_row, column, whole, grid.length);
      dy[i] = ops::cuda::load_vector<N>(dy_row, column, whole, grid.length);
      if (t.accumulate_dx) before[i] = ops::cuda::load_vector<N>(dx_row, column, whole, grid.length);
    });
    r = t.rstd[row];
  }
  __device__ __forceinline__ float product(int i, int j) const { return dy[i][j] * x[i][j]; }
};

template <int kHeld, int N, class T>
__global__ void __launch_bounds__(RowGrid::kThreads, kHeld <= 2 ? ops::cuda::kBackwardBlocksEach : 1)
    backward_kernel(BackwardOperands<T> t, RowGrid grid, ops::cuda::PartialSums partial) {
  flashgla::cuda::wait_for_previous();
  extern __shared__ float shared[];
  Team team(grid.team, shared);
  using Held = HeldRow<kHeld, N, T>;
  ops::cuda::rms_backward<kHeld, N, Held>(
      t, grid, partial, shared, team, [&](const Held& held, std::int64_t row, float pull, const auto& weight) {
        T* dx_row = t.dx.at(row, 0);
        ops::cuda::for_each_vector<kHeld, N>(grid, team.rank(), [&](int i, std::int64_t column, bool whole) {
          float out[N];
#pragma unroll
          for (int j = 0; j < N; ++j) {
            out[j] = held.dy[i][j] * weight[i][j] * held.r - held.x[i][j] * pull;
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
  float weight[N], dot = 0.0f;
  ops::cuda::for_each_vector<0, N>(grid, team.rank(), [&](int, std::int64_t column, bool whole) {
    const auto x = ops::cuda::load_vector<N>(x_row, column, whole, grid.length);
    const auto dy = ops::cuda::load_vector<N>(dy_row, column, whole, grid.length);
    t.weight.template load<N>(column, whole, grid.length, weight);
#pragma unroll
    for (int j = 0; j < N; ++j) dot += dy[j] * x[j] * weight[j];
  });
  const float r = t.rstd[row], pull = r * r * r * (team.sum(dot) / static_cast<float>(grid.length));
  ops::cuda::for_each_vector<0, N>(grid, team.rank(), [&](int, std::int64_t column, bool whole) {
    const auto x = ops::cuda::load_vector<N>(x_row, column, whole, grid.length);
    const auto dy = ops::cuda::load_vector<N>(dy_row, column, whole, grid.length);
    t.weight.template load<N>(column, whole, grid.length, weight);
    float out[N];
#pragma unroll
    for (int j = 0; j < N; ++j) out[j] = dy[j] * weight[j] * r - x[j] * pull;
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
    total +=
        flashgla::cuda::to_float(*t.dy.at(row, column)) * flashgla::cuda::to_float(*t.x.at(row, column)) * t.rstd[row];
  }
  partial.sums[block * partial.columns + column] = total;
}

template <int N, class T>
void forward_of(Context& context, const Inputs& inputs, const Outputs& outputs, double epsilon) {
  const TensorView& x = inputs.x;
  const ForwardOperands<T> operands{Operand<T>(x), Operand<T>(outputs.y), ops::cuda::weight_vector(inputs.weight, N),
                                    outputs.rstd ? outputs.rstd.as<float>() : nullptr, static_cast<float>(epsilon)};
  const std::int64_t rows = rows_of(x.shape), length = x.size(-1);
  const BlockRows grid(rows, length, N, length % N == 0 && operands.weight.aligned);
  if (grid.held() > 0) {
    return ops::cuda::with_room(grid, operands.weight.wide, [&](auto held, auto weight) {
      ops::cuda::queue_kernel(context, "rms_norm", forward_kernel<held.value, N, decltype(weight), T>, grid.blocks(1),
                              grid.threads(), 0, operands, grid);
    });
  }
  const RowGrid long_grid(rows, length, N);
  ops::cuda::queue_kernel(context, "rms_norm", long_forward_kernel<N, T>, long_grid.blocks(), RowGrid::kThreads, 0,
                          operands, long_grid);
}

template <int N, class T>
void backward_of(Context& context, const TensorView& x, const TensorView& weight, const TensorView& rstd,
                 const TensorView& dy, const TensorView& dx, bool accumulate_dx, const TensorView& dweight,
                 const ops::cuda::PartialSums& partial) {
  const BackwardOperands<T> operands{Operand<T>(x),
                                     Operand<T>(dy),
                                     Operand<T>(dx),
                                     ops::cuda::weight_vector(weight, N),
                                     rstd.as<float>(),
                                     accumulate_dx,
                                     static_cast<bool>(dweight)};
  const RowGrid grid(rows_of(x.shape), x.size(-1), N);
  ops::cuda::with_held_vectors(grid, [&](auto held) {
    if constexpr (held.value > 0) {
      ops::cuda::queue_kernel(context, "rms_norm", backward_kernel<held.value, N, T>, partial.blocks(),
                              RowGrid::kThreads, ops::cuda::backward_shared<held.value, N>(grid), operands, grid,
                              partial);
    } else {
      const std::int64_t tiles = (grid.length + RowGrid::kThreads - 1) / RowGrid::kThreads;
      if (dweight) {  // before dx, which may take dy's place
        ops::cuda::queue_kernel(context, "rms_norm", long_rows_dweight_kernel<T>, partial.blocks() * tiles,
                                RowGrid::kThreads, 0, operands, partial, tiles);
      }
      ops::cuda::queue_kernel(context, "rms_norm", long_rows_kernel<N, T>, grid.blocks(), RowGrid::kThreads, 0,
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

void cuda_backward(Context& context, const TensorView& x, const TensorView& weight, const TensorView& rstd,
                   const TensorView& dy, const TensorView& dx, bool accumulate_dx, const TensorView& dweight) {
  const ArenaScope scope(context.scratch());
  const auto partial = ops::cuda::take_sums_of_rows(context, x, "rms_norm: dweight");
  if (context.planning()) return;
  const auto aligned = [&](int elements) { return ops::cuda::are_aligned({&x, &dy, &dx}, elements); };
  const auto run = x.dtype == DType::f32 ? (aligned(4) ? backward_of<4, float> : backward_of<1, float>)
                                         : (aligned(8) ? backward_of<8, bf16> : backward_of<1, bf16>);
  run(context, x, weight, rstd, dy, dx, accumulate_dx, dweight, partial);
  if (dweight) ops::cuda::reduce(context, partial, dweight.as<float>(), true);
}

}  // namespace

const Implementation kCuda{"cuda", Device::Kind::cuda,
                           [](const Problem& problem, const Architecture&) {
                             return supports_f32_and_bf16({problem.dtype, problem.weight_dtype});
                           },
                           cuda_forward, cuda_backward};

}  // namespace flashgla::ops::rms_norm
