// Forward, a block of threads, or a warp, holds two rows; backward, a team of them one, and the sums of dweight are
// those of fixed blocks of rows.
#include "flashgla/ops/cuda/math.cuh"
#include "flashgla/ops/cuda/rms_backward.cuh"
#include "flashgla/ops/cuda/rows_by_block.cuh"
#include "flashgla/ops/rms_norm_swish_gate/implementations.h"

namespace flashgla::ops::rms_norm_swish_gate {

namespace {

using ops::cuda::BlockRows;
using ops::cuda::Operand;
using ops::cuda::RowGrid;
using ops::cuda::Team;
using ops::cuda::Vector;

template <class T>
struct ForwardOperands {
  Operand<T> x, gate, y;
  ops::cuda::WeightVector weight;
  float* rstd;  // null: not wanted
  float epsilon;
};

constexpr int kForwardRows = 2;  // next to each other, at once: the weight is read once for both

template <int kHeld, int N, class W, class T>
__global__ void __launch_bounds__(BlockRows::kThreads) forward_kernel(ForwardOperands<T> t, BlockRows grid) {
  flashgla::cuda::release_next_of_waves();
  flashgla::cuda::wait_for_previous();
  constexpr int kRows = kForwardRows;
  __shared__ ops::cuda::SumsOfBlock<kRows> sums;
  using Rows = ops::cuda::RowsOfBlock<kRows, kHeld, N, T>;
  const Rows held(t.x, grid), gates(t.gate, grid);  // all loads before the first use
  if (held.count < 1) return;                       // whole warps, and then there is no barrier
  Vector<W, N> weight[kHeld];
  float r[kRows];
  ops::cuda::for_each_held<kHeld, N>(grid,
                                     [&](int i, int column) { weight[i] = t.weight.template packed<N, W>(column); });
  held.sum(
      grid, [](int, float x, float total) { return fmaf(x, x, total); }, r);
  sums.add_up(grid, r);
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    if (k >= held.count) break;
    r[k] = rsqrtf(fmaf(r[k], grid.each, t.epsilon));
    if (t.rstd && grid.rank() == 0) t.rstd[held.first + k] = r[k];
    T* y = t.y.at(held.first + k, 0);
    ops::cuda::for_each_held<kHeld, N>(grid, [&](int i, int column) {
      float out[N];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float z = gates.x[k][i][j];
        out[j] = held.x[k][i][j] * r[k] * weight[i][j] * (z * ops::cuda::sigmoid(z));
      }
      Vector<T, N>::of(out).store(y + column);
    });
  }
}

// Rows that are too long to be held, or no whole vectors.
template <int N, class T>
__global__ void __launch_bounds__(RowGrid::kThreads) long_forward_kernel(ForwardOperands<T> t, RowGrid grid) {
  flashgla::cuda::wait_for_previous();
  __shared__ float shared[RowGrid::kSharedFloats];
  Team team(grid.team, shared);
  const std::int64_t row = std::int64_t{blockIdx.x} * grid.teams() + team.index();
  if (row >= grid.rows) return;  // whole teams
  const T* x_row = t.x.at(row, 0);
  const T* gate_row = t.gate.at(row, 0);
  T* y = t.y.at(row, 0);
  float squares = 0.0f;
  ops::cuda::for_each_vector<0, N>(grid, team.rank(), [&](int, std::int64_t column, bool whole) {
    const auto x = ops::cuda::load_vector<N>(x_row, column, whole, grid.length);
#pragma unroll
    for (int j = 0; j < N; ++j) squares += x[j] * x[j];
  });
  const float r = rsqrtf(team.sum(squares) / static_cast<float>(grid.length) + t.epsilon);
  if (t.rstd && team.rank() == 0) t.rstd[row] = r;
  ops::cuda::for_each_vector<0, N>(grid, team.rank(), [&](int, std::int64_t column, bool whole) {
    const auto x = ops::cuda::load_vector<N>(x_row, column, whole, grid.length);
    const auto gate = ops::cuda::load_vector<N>(gate_row, column, whole, grid.length);
    float weight[N], out[N];
    t.weight.template load<N>(column, whole, grid.length, weight);
#pragma unroll
    for (int j = 0; j < N; ++j) out[j] = x[j] * r * weight[j] * (gate[j] * ops::cuda::sigmoid(gate[j]));
    ops::cuda::store_vector<N>(y, column, whole, grid.length, Vector<T, N>::of(out));
  });
}

template <class T>
struct BackwardOperands {
  Operand<T> x, gate, dy, dx, dgate;
  ops::cuda::WeightVector weight;
  const float* rstd;
  bool want_dweight;
};

// What one element adds to the row's dot product, and to dweight but for r. s: sigmoid(gate).
__device__ __forceinline__ float gated(float x, float gate, float dy, float s) { return dy * (gate * s) * x; }
__device__ __forceinline__ float gated(float x, float gate, float dy) {
  return gated(x, gate, dy, ops::cuda::sigmoid(gate));
}

// sigmoid(j): of gate[j].
template <int N, class T, class Weight, class Sigmoid>
__device__ __forceinline__ void store_gradients(const Vector<T, N>& x, const Vector<T, N>& gate, const Vector<T, N>& dy,
                                                const Sigmoid& sigmoid, const Weight& weight, float r, float pull,
                                                T* dx_row, T* dgate_row, std::int64_t column, bool whole,
                                                std::int64_t length) {
  float to_x[N], to_gate[N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const float z = gate[j], s = sigmoid(j), u = dy[j] * weight[j] * r;
    to_x[j] = u * (z * s) - x[j] * pull;
    to_gate[j] = u * x[j] * ops::cuda::silu_slope(z, s);
  }
  ops::cuda::store_vector<N>(dx_row, column, whole, length, Vector<T, N>::of(to_x));
  ops::cuda::store_vector<N>(dgate_row, column, whole, length, Vector<T, N>::of(to_gate));
}

// What a thread holds of one row. kKeeps: sigmoids too, which are else made twice.
template <int kHeld, int N, class T, bool kKeeps>
struct HeldRow {
  Vector<T, N> x[kHeld], gate[kHeld], dy[kHeld];
  float r, kept[kKeeps ? kHeld : 1][N];

  template <class Grid>
  __device__ __forceinline__ void load(const BackwardOperands<T>& t, const Grid& grid, int rank, std::int64_t row) {
    const T* x_row = t.x.at(row, 0);
    const T* gate_row = t.gate.at(row, 0);
    const T* dy_row = t.dy.at(row, 0);
    ops::cuda::for_each_vector<kHeld, N>(grid, rank, [&](int i, std::int64_t column, bool whole) {
      x[i] = ops::cuda::load_vector<N>(x_row, column, whole, grid.length);
      gate[i] = ops::cuda::load_vector<N>(gate_row, column, whole, grid.length);
      dy[i] = ops::cuda::load_vector<N>(dy_row, column, whole, grid.length);
    });
    r = t.rstd[row];
  }
  __device__ __forceinline__ float product(int i, int j) {
    const float s = ops::cuda::sigmoid(gate[i][j]);
    if constexpr (kKeeps) kept[i][j] = s;
    return gated(x[i][j], gate[i][j], dy[i][j], s);
  }
  __device__ __forceinline__ float sigmoid(int i, int j) const {
    if constexpr (kKeeps) return kept[i][j];
    return ops::cuda::sigmoid(gate[i][j]);
  }
};

template <int kHeld, int N, class Grid, class T>
__global__ void __launch_bounds__(RowGrid::kThreads, kHeld <= 2 ? ops::cuda::kBackwardBlocksEach : 1)
    backward_kernel(BackwardOperands<T> t, Grid grid, ops::cuda::PartialSums partial) {
  flashgla::cuda::wait_for_previous();
  extern __shared__ float shared[];
  Team team(grid.team, shared);
  using Held = HeldRow<kHeld, N, T, !std::is_same_v<Grid, RowGrid>>;
  ops::cuda::rms_backward<kHeld, N, Held>(
      t, grid, partial, shared, team, [&](const Held& held, std::int64_t row, float pull, const auto& weight) {
        T* dx_row = t.dx.at(row, 0);
        T* dgate_row = t.dgate.at(row, 0);
        ops::cuda::for_each_vector<kHeld, N>(grid, team.rank(), [&](int i, std::int64_t column, bool whole) {
          store_gradients<N>(
              held.x[i], held.gate[i], held.dy[i], [&](int j) { return held.sigmoid(i, j); }, weight[i], held.r, pull,
              dx_row, dgate_row, column, whole, grid.length);
        });
      });
}

// Rows too long to be held: dx and dgate alone.
template <int N, class T>
__global__ void __launch_bounds__(RowGrid::kThreads, 1)  // 1: ptxas else spills
    long_rows_kernel(BackwardOperands<T> t, RowGrid grid) {
  flashgla::cuda::wait_for_previous();
  __shared__ float shared[RowGrid::kSharedFloats];
  Team team(grid.team, shared);
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * grid.teams() + team.index();
  if (row >= grid.rows) return;
  const T* x_row = t.x.at(row, 0);
  const T* gate_row = t.gate.at(row, 0);
  const T* dy_row = t.dy.at(row, 0);
  T* dx_row = t.dx.at(row, 0);
  T* dgate_row = t.dgate.at(row, 0);
  float weight[N], dot = 0.0f;
  ops::cuda::for_each_vector<0, N>(grid, team.rank(), [&](int, std::int64_t column, bool whole) {
    const auto x = ops::cuda::load_vector<N>(x_row, column, whole, grid.length);
    const auto gate = ops::cuda::load_vector<N>(gate_row, column, whole, grid.length);
    const auto dy = ops::cuda::load_vector<N>(dy_row, column, whole, grid.length);
    t.weight.template load<N>(column, whole, grid.length, weight);
#pragma unroll
    for (int j = 0; j < N; ++j) dot += gated(x[j], gate[j], dy[j]) * weight[j];
  });
  const float r = t.rstd[row], pull = r * r * r * (team.sum(dot) / static_cast<float>(grid.length));
  ops::cuda::for_each_vector<0, N>(grid, team.rank(), [&](int, std::int64_t column, bool whole) {
    const auto x = ops::cuda::load_vector<N>(x_row, column, whole, grid.length);
    const auto gate = ops::cuda::load_vector<N>(gate_row, column, whole, grid.length);
    const auto dy = ops::cuda::load_vector<N>(dy_row, column, whole, grid.length);
    t.weight.template load<N>(column, whole, grid.length, weight);
    store_gradients<N>(
        x, gate, dy, [&](int j) { return ops::cuda::sigmoid(gate[j]); }, weight, r, pull, dx_row, dgate_row, column,
        whole, grid.length);
  });
}

// dweight's sums of such rows: a thread takes a column.
template <class T>
__global__ void __launch_bounds__(RowGrid::kThreads)
    long_rows_dweight_kernel(BackwardOperands<T> t, ops::cuda::PartialSums partial, std::int64_t tiles) {
  flashgla::cuda::wait_for_previous();
  const std::int64_t block = blockIdx.x / tiles, column = blockIdx.x % tiles * RowGrid::kThreads + threadIdx.x;
  if (column >= partial.columns) return;
  using flashgla::cuda::to_float;
  float total = 0.0f;
#pragma unroll 4
  for (std::int64_t row = partial.begin(block); row < partial.end(block); ++row) {
    total += gated(to_float(*t.x.at(row, column)), to_float(*t.gate.at(row, column)), to_float(*t.dy.at(row, column))) *
             t.rstd[row];
  }
  partial.sums[block * partial.columns + column] = total;
}

template <int N, class T>
void forward_of(Context& context, const TensorView& x, const TensorView& gate, const TensorView& weight,
                const TensorView& y, const TensorView& rstd, double epsilon) {
  const ForwardOperands<T> operands{Operand<T>(x),
                                    Operand<T>(gate),
                                    Operand<T>(y),
                                    ops::cuda::weight_vector(weight, N),
                                    rstd ? rstd.as<float>() : nullptr,
                                    static_cast<float>(epsilon)};
  const std::int64_t rows = rows_of(x.shape), length = x.size(-1);
  const BlockRows grid(rows, length, N, length % N == 0 && operands.weight.aligned);
  if (grid.held() > 0) {
    return ops::cuda::with_room(grid, operands.weight.wide, [&](auto held, auto weight) {
      ops::cuda::queue_kernel(context, "rms_norm_swish_gate", forward_kernel<held.value, N, decltype(weight), T>,
                              grid.blocks(kForwardRows), grid.threads(), 0, operands, grid);
    });
  }
  const RowGrid long_grid(rows, length, N);
  ops::cuda::queue_kernel(context, "rms_norm_swish_gate", long_forward_kernel<N, T>, long_grid.blocks(),
                          RowGrid::kThreads, 0, operands, long_grid);
}

template <int N, class T>
void backward_of(Context& context, const BackwardOperands<T>& operands, const ops::cuda::PartialSums& partial) {
  const RowGrid grid(partial.rows, partial.columns, N);
  const bool whole = grid.length % N == 0;
  ops::cuda::with_rows<N>(grid, whole, [&](const auto& rows, auto held) {
    if constexpr (held.value > 0) {
      ops::cuda::queue_kernel(context, "rms_norm_swish_gate",
                              backward_kernel<held.value, N, std::remove_cvref_t<decltype(rows)>, T>, partial.blocks(),
                              RowGrid::kThreads, ops::cuda::backward_shared<held.value, N>(rows), operands, rows,
                              partial);
    } else {
      const std::int64_t tiles = (grid.length + RowGrid::kThreads - 1) / RowGrid::kThreads;
      if (operands.want_dweight) {  // before dx and dgate, which may take the place of dy and gate
        ops::cuda::queue_kernel(context, "rms_norm_swish_gate", long_rows_dweight_kernel<T>, partial.blocks() * tiles,
                                RowGrid::kThreads, 0, operands, partial, tiles);
      }
      ops::cuda::queue_kernel(context, "rms_norm_swish_gate", long_rows_kernel<N, T>, grid.blocks(), RowGrid::kThreads,
                              0, operands, grid);
    }
  });
}

using bf16 = __nv_bfloat16;

void cuda_forward(Context& context, const TensorView& x, const TensorView& gate, const TensorView& weight,
                  const TensorView& y, const TensorView& rstd, double epsilon) {
  if (context.planning()) return;
  const auto aligned = [&](int elements) { return ops::cuda::are_aligned({&x, &gate, &y}, elements); };
  const auto run = x.dtype == DType::f32 ? (aligned(4) ? forward_of<4, float> : forward_of<1, float>)
                                         : (aligned(8) ? forward_of<8, bf16> : forward_of<1, bf16>);
  run(context, x, gate, weight, y, rstd, epsilon);
}

template <class T>
void backward_on(Context& context, const TensorView& x, const TensorView& gate, const TensorView& weight,
                 const TensorView& rstd, const TensorView& dy, const TensorView& dx, const TensorView& dgate,
                 bool want_dweight, const ops::cuda::PartialSums& partial) {
  constexpr int kElements = flashgla::cuda::kVectorOf<T>;
  const bool aligned = ops::cuda::are_aligned({&x, &gate, &dy, &dx, &dgate}, kElements);
  const BackwardOperands<T> operands{Operand<T>(x),     Operand<T>(gate),
                                     Operand<T>(dy),    Operand<T>(dx),
                                     Operand<T>(dgate), ops::cuda::weight_vector(weight, aligned ? kElements : 1),
                                     rstd.as<float>(),  want_dweight};
  (aligned ? backward_of<kElements, T> : backward_of<1, T>)(context, operands, partial);
}

void cuda_backward(Context& context, const TensorView& x, const TensorView& gate, const TensorView& weight,
                   const TensorView& rstd, const TensorView& dy, const TensorView& dx, const TensorView& dgate,
                   const TensorView& dweight) {
  const ArenaScope scope(context.scratch());
  const auto partial = ops::cuda::take_sums_of_rows(context, x, "rms_norm_swish_gate: dweight");
  if (context.planning()) return;
  const bool want_dweight = static_cast<bool>(dweight);
  (x.dtype == DType::f32 ? backward_on<float> : backward_on<bf16>)(context, x, gate, weight, rstd, dy, dx, dgate,
                                                                   want_dweight, partial);
  if (want_dweight) ops::cuda::reduce(context, partial, dweight.as<float>(), true);
}

}  // namespace

const Implementation kCuda{"cuda", Device::Kind::cuda,
                           [](const Problem& problem, const Architecture&) {
                             return supports_f32_and_bf16({problem.dtype, problem.weight_dtype});
                           },
                           cuda_forward, cuda_backward};

}  // namespace flashgla::ops::rms_norm_swish_gate
