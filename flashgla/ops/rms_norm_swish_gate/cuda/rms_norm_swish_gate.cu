// A team of threads holds a row; the sums of dweight are those of fixed blocks of rows.
#include "flashgla/ops/cuda/math.cuh"
#include "flashgla/ops/cuda/rms_backward.cuh"
#include "flashgla/ops/rms_norm_swish_gate/implementations.h"

namespace flashgla::ops::rms_norm_swish_gate {

namespace {

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

// Rows next to each other that a team takes at once.
constexpr int rows_at_once(int held) { return held > 0 && held <= 2 ? 2 : 1; }

template <int kHeld, int N, class T>
__global__ void __launch_bounds__(RowGrid::kThreads) forward_kernel(ForwardOperands<T> t, RowGrid grid) {
  flashgla::cuda::release_next_of_waves();
  flashgla::cuda::wait_for_previous();
  constexpr int kRows = rows_at_once(kHeld), kPlaces = kHeld == 0 ? 1 : kHeld;
  __shared__ float shared[RowGrid::kSharedFloats];
  Team team(grid.team, shared);
  const std::int64_t row = (std::int64_t{blockIdx.x} * grid.teams() + team.index()) * kRows;
  if (row >= grid.rows) return;  // whole teams
  const int rows = row + kRows <= grid.rows ? kRows : 1;
  Vector<T, N> x[kRows][kPlaces], gate[kRows][kPlaces];
  const auto load = [&](int k, int i, std::int64_t column, bool whole) {
    x[k][i] = ops::cuda::load_vector<N>(t.x.at(row + k, 0), column, whole, grid.length);
    gate[k][i] = ops::cuda::load_vector<N>(t.gate.at(row + k, 0), column, whole, grid.length);
  };
  if constexpr (kHeld > 0) {  // all loads before the first use
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      ops::cuda::for_each_vector<kHeld, N>(grid, team.rank(), [&](int i, std::int64_t column, bool whole) {
        if (k < rows) load(k, i, column, whole);
      });
    }
  }
  float r[kRows];
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    float squares = 0.0f;
    ops::cuda::for_each_vector<kHeld, N>(grid, team.rank(), [&](int i, std::int64_t column, bool whole) {
      if constexpr (kHeld == 0) x[0][0] = ops::cuda::load_vector<N>(t.x.at(row, 0), column, whole, grid.length);
#pragma unroll
      for (int j = 0; j < N; ++j) squares += x[k][i][j] * x[k][i][j];
    });
    r[k] = rsqrtf(team.sum(squares) / static_cast<float>(grid.length) + t.epsilon);
    if (t.rstd && team.rank() == 0 && k < rows) t.rstd[row + k] = r[k];
  }
  ops::cuda::for_each_vector<kHeld, N>(grid, team.rank(), [&](int i, std::int64_t column, bool whole) {
    if constexpr (kHeld == 0) load(0, 0, column, whole);
    float weight[N];
    t.weight.template load<N>(column, whole, grid.length, weight);
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      if (k >= rows) break;
      float out[N];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float z = gate[k][i][j];
        out[j] = x[k][i][j] * r[k] * weight[j] * (z * ops::cuda::sigmoid(z));
      }
      ops::cuda::store_vector<N>(t.y.at(row + k, 0), column, whole, grid.length, Vector<T, N>::of(out));
    }
  });
}

template <class T>
struct BackwardOperands {
  Operand<T> x, gate, dy, dx, dgate;
  ops::cuda::WeightVector weight;
  const float* rstd;
  bool want_dweight;
};

// What one element adds to the row's dot product, and to dweight but for r.
__device__ __forceinline__ float gated(float x, float gate, float dy) {
  return dy * (gate * ops::cuda::sigmoid(gate)) * x;
}

template <int N, class T>
__device__ __forceinline__ void store_gradients(const Vector<T, N>& x, const Vector<T, N>& gate, const Vector<T, N>& dy,
                                                const float (&weight)[N], float r, float pull, T* dx_row, T* dgate_row,
                                                std::int64_t column, bool whole, std::int64_t length) {
  float to_x[N], to_gate[N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const float z = gate[j], s = ops::cuda::sigmoid(z), u = dy[j] * weight[j] * r;
    to_x[j] = u * (z * s) - x[j] * pull;
    to_gate[j] = u * x[j] * ops::cuda::silu_slope(z, s);
  }
  ops::cuda::store_vector<N>(dx_row, column, whole, length, Vector<T, N>::of(to_x));
  ops::cuda::store_vector<N>(dgate_row, column, whole, length, Vector<T, N>::of(to_gate));
}

// What a thread holds of one row.
template <int kHeld, int N, class T>
struct HeldRow {
  Vector<T, N> x[kHeld], gate[kHeld], dy[kHeld];
  float r;

  __device__ __forceinline__ void load(const BackwardOperands<T>& t, const RowGrid& grid, int rank, std::int64_t row) {
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
  __device__ __forceinline__ float product(int i, int j) const { return gated(x[i][j], gate[i][j], dy[i][j]); }
};

template <int kHeld, int N, class T>
__global__ void __launch_bounds__(RowGrid::kThreads, kHeld <= 2 ? ops::cuda::kBackwardBlocksEach : 1)
    backward_kernel(BackwardOperands<T> t, RowGrid grid, ops::cuda::PartialSums partial) {
  flashgla::cuda::wait_for_previous();
  extern __shared__ float shared[];
  Team team(grid.team, shared);
  using Held = HeldRow<kHeld, N, T>;
  ops::cuda::rms_backward<kHeld, N, Held>(
      t, grid, partial, shared, team,
      [&](const Held& held, std::int64_t row, float pull, const float(&weight)[kHeld][N]) {
        T* dx_row = t.dx.at(row, 0);
        T* dgate_row = t.dgate.at(row, 0);
        ops::cuda::for_each_vector<kHeld, N>(grid, team.rank(), [&](int i, std::int64_t column, bool whole) {
          store_gradients<N>(held.x[i], held.gate[i], held.dy[i], weight[i], held.r, pull, dx_row, dgate_row, column,
                             whole, grid.length);
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
    store_gradients<N>(x, gate, dy, weight, r, pull, dx_row, dgate_row, column, whole, grid.length);
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
  const RowGrid grid(rows_of(x.shape), x.size(-1), N);
  ops::cuda::with_held_vectors(grid, [&](auto held) {
    ops::cuda::queue_kernel(context, "rms_norm_swish_gate", forward_kernel<held.value, N, T>,
                            (grid.blocks() + rows_at_once(held.value) - 1) / rows_at_once(held.value),
                            RowGrid::kThreads, 0, operands, grid);
  });
}

template <int N, class T>
void backward_of(Context& context, const BackwardOperands<T>& operands, const ops::cuda::PartialSums& partial) {
  const RowGrid grid(partial.rows, partial.columns, N);
  ops::cuda::with_held_vectors(grid, [&](auto held) {
    if constexpr (held.value > 0) {
      const int floats = std::max(RowGrid::kSharedFloats, RowGrid::kThreads * held.value * N);
      ops::cuda::queue_kernel(context, "rms_norm_swish_gate", backward_kernel<held.value, N, T>, partial.blocks(),
                              RowGrid::kThreads, floats * static_cast<int>(sizeof(float)), operands, grid, partial);
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
