// The backward pass of norms over rows (rms_norm, layer_norm, rms_norm_swish_gate): kernels and their launches. Norm is
// what a kernel is called with, operands weight and want_dweight among them, and knows:
//
//     Row row(i)                       where row i of its operands begins
//     kCentred                         whether u = dy weight is taken less its mean over the row
//     kWholeRows                       whether rows go over WholeRows where they are such
//     Held<kHeld, N, kWhole>           what a thread holds of a row: kHeld vectors of N elements; kWhole: of WholeRows
//
// A Held has dy[i][j], the element j of its vector i, and r, the row's 1 / root mean square, and knows:
//
//     load(norm, from, i, column, whole, length), load_statistics(norm, row)
//     product(i, j)                    what an element adds to dweight but for r
//     weighted(i, j, weight)           what it adds to the row's dot product: its product with its weight
//     write(norm, to, i, column, whole, length, weight, pull, mean_u)
//                                      a vector's gradients, in which x is pulled by `pull` to zero
#pragma once

#include "flashgla/ops/cuda/rows_by_team.cuh"

namespace flashgla::ops::cuda {

// A weight in shared memory in f32, in planes of four consecutive elements of each vector, so that lanes beside each
// other read without bank conflicts: [i][j] is element j of a thread's vector i.
template <int N, int kTeam>
struct SharedWeight {
  static constexpr int kEach = N < 4 ? N : 4, kPlanes = N / kEach;
  float* data;
  int vectors, rank;

  // By all threads of the block.
  __device__ __forceinline__ void fill(const WeightVector& from) const {
    for (int i = static_cast<int>(threadIdx.x); i < vectors * N; i += RowGrid::kThreads) {
      float value[1];
      from.template load<1>(i, true, vectors * N, value);
      data[((i % N) / kEach * vectors + i / N) * kEach + i % kEach] = value[0];
    }
    __syncthreads();
  }
  struct Elements {
    Vector<float, kEach> planes[kPlanes];
    __device__ __forceinline__ float operator[](int j) const { return planes[j / kEach][j % kEach]; }
  };
  __device__ __forceinline__ Elements operator[](int i) const {
    Elements elements;
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      elements.planes[plane] = Vector<float, kEach>::load(data + (plane * vectors + i * kTeam + rank) * kEach);
    }
    return elements;
  }
};

// Floats of shared memory for the sums of a block's teams and of its columns; behind them a weight may lie.
template <int kHeld, int N>
constexpr int kBackwardFloats = std::max(RowGrid::kSharedFloats, RowGrid::kThreads* kHeld* N);

template <int kHeld, int N>
int backward_shared(const RowGrid&) {
  return kBackwardFloats<kHeld, N> * static_cast<int>(sizeof(float));
}
template <int kHeld, int N, int kTeam>
int backward_shared(const WholeRows<kTeam>& grid) {
  return (kBackwardFloats<kHeld, N> + static_cast<int>(grid.length)) * static_cast<int>(sizeof(float));
}

// The same in registers.
template <int kHeld, int N>
struct HeldWeight {
  float held[kHeld][N];

  __device__ __forceinline__ void fill(const WeightVector&) const {}
  __device__ __forceinline__ const float (&operator[](int i) const)[N] { return held[i]; }
};

// The weight's elements for a thread's vectors: in registers, or of WholeRows, which keep more there, in shared memory
// from fill() on.
template <int kHeld, int N>
__device__ __forceinline__ HeldWeight<kHeld, N> weight_of(const WeightVector& from, const RowGrid& grid, int rank,
                                                          float*) {
  HeldWeight<kHeld, N> weight;
  for_each_vector<kHeld, N>(grid, rank, [&](int i, std::int64_t column, bool whole) {
    from.template load<N>(column, whole, grid.length, weight.held[i]);
  });
  return weight;
}
template <int kHeld, int N, int kTeam>
__device__ __forceinline__ SharedWeight<N, kTeam> weight_of(const WeightVector&, const WholeRows<kTeam>& grid, int rank,
                                                            float* shared) {
  return {shared + kBackwardFloats<kHeld, N>, grid.vectors, rank};
}

template <int kHeld, int N, class Held, class Norm, class Grid>
__device__ __forceinline__ void load_row(Held& held, const Norm& norm, const Grid& grid, int rank, std::int64_t row) {
  const auto from = norm.row(row);
  for_each_vector<kHeld, N>(grid, rank, [&](int i, std::int64_t column, bool whole) {
    held.load(norm, from, i, column, whole, grid.length);
  });
  held.load_statistics(norm, row);
}

// Over RowGrid or WholeRows: teams take rows in turns, so that what all of them read at a time lies close together; the
// next row is on its way while one is worked on.
template <int kHeld, int N, class Grid, class Norm>
__device__ __forceinline__ void norm_backward(const Norm& norm, const Grid& grid, const PartialSums& partial,
                                              float* shared, Team& team) {
  const auto weight = weight_of<kHeld, N>(norm.weight, grid, team.rank(), shared);
  float sums[kHeld][N];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
#pragma unroll
    for (int j = 0; j < N; ++j) sums[i][j] = 0.0f;
  }
  const std::int64_t end = partial.rows, apart = std::int64_t{gridDim.x} * grid.teams();
  std::int64_t row = std::int64_t{blockIdx.x} * grid.teams() + team.index();
  typename Norm::template Held<kHeld, N, !std::is_same_v<Grid, RowGrid>> held, next;
  if (row < end) load_row<kHeld, N>(held, norm, grid, team.rank(), row);
  weight.fill(norm.weight);
  for (; row < end; row += apart) {
    if (row + apart < end) load_row<kHeld, N>(next, norm, grid, team.rank(), row + apart);
    const float r = held.r;
    float dot = 0.0f, mean_u = 0.0f;
    for_each_vector<kHeld, N>(grid, team.rank(), [&](int i, std::int64_t, bool) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float product = held.product(i, j);
        dot += product * weight[i][j];
        sums[i][j] += product * r;
      }
    });
    const float pull = r * r * r * (team.sum(dot) / static_cast<float>(grid.length));
    if constexpr (Norm::kCentred) {
      for_each_vector<kHeld, N>(grid, team.rank(), [&](int i, std::int64_t, bool) {
#pragma unroll
        for (int j = 0; j < N; ++j) mean_u += held.dy[i][j] * weight[i][j];
      });
      mean_u = team.sum(mean_u) / static_cast<float>(grid.length);
    }
    const auto to = norm.row(row);
    for_each_vector<kHeld, N>(grid, team.rank(), [&](int i, std::int64_t column, bool whole) {
      held.write(norm, to, i, column, whole, grid.length, weight, pull, mean_u);
    });
    held = next;
  }
  flashgla::cuda::release_next();  // to the sums
  if (!norm.want_dweight) return;
  __syncthreads();  // of the teams' sums, whose memory is taken
  store_sums<kHeld, N>(grid, team, partial, sums, shared);
}

// On a multiprocessor; 0: not said.
template <int kHeld, class Norm>
constexpr int kNormBlocksEach = Norm::kCentred ? 0
                                : kHeld <= 2   ? kBackwardBlocksEach
                                               : 1;

template <int kHeld, int N, class Grid, class Norm>
__global__ void __launch_bounds__(RowGrid::kThreads, kNormBlocksEach<kHeld, Norm>)
    norm_backward_kernel(Norm norm, Grid grid, PartialSums partial) {
  flashgla::cuda::wait_for_previous();
  extern __shared__ float shared[];
  Team team(grid.team, shared);
  norm_backward<kHeld, N>(norm, grid, partial, shared, team);
}

// Rows too long to be held: all but dweight.
template <int N, class Norm>
__global__ void __launch_bounds__(RowGrid::kThreads) norm_long_backward_kernel(Norm norm, RowGrid grid) {
  flashgla::cuda::wait_for_previous();
  __shared__ float shared[RowGrid::kSharedFloats];
  Team team(grid.team, shared);
  const std::int64_t row = std::int64_t{blockIdx.x} * grid.teams() + team.index();
  if (row >= grid.rows) return;  // whole teams
  const auto place = norm.row(row);
  typename Norm::template Held<1, N, false> of_row;
  of_row.load_statistics(norm, row);
  HeldWeight<1, N> weight;
  float dot = 0.0f, mean_u = 0.0f;
  for_each_vector<0, N>(grid, team.rank(), [&](int, std::int64_t column, bool whole) {
    auto held = of_row;
    held.load(norm, place, 0, column, whole, grid.length);
    norm.weight.template load<N>(column, whole, grid.length, weight.held[0]);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      dot += held.weighted(0, j, weight[0][j]);
      if constexpr (Norm::kCentred) mean_u += held.dy[0][j] * weight[0][j];
    }
  });
  const float r = of_row.r, pull = r * r * r * (team.sum(dot) / static_cast<float>(grid.length));
  if constexpr (Norm::kCentred) mean_u = team.sum(mean_u) / static_cast<float>(grid.length);
  for_each_vector<0, N>(grid, team.rank(), [&](int, std::int64_t column, bool whole) {
    auto held = of_row;
    held.load(norm, place, 0, column, whole, grid.length);
    norm.weight.template load<N>(column, whole, grid.length, weight.held[0]);
    held.write(norm, place, 0, column, whole, grid.length, weight, pull, mean_u);
  });
}

// dweight's sums of such rows: a thread takes a column.
template <class Norm>
__global__ void __launch_bounds__(RowGrid::kThreads)
    norm_long_dweight_kernel(Norm norm, PartialSums partial, std::int64_t tiles) {
  flashgla::cuda::wait_for_previous();
  const std::int64_t block = blockIdx.x / tiles, column = blockIdx.x % tiles * RowGrid::kThreads + threadIdx.x;
  if (column >= partial.columns) return;
  float total = 0.0f;
#pragma unroll 4
  for (std::int64_t row = partial.begin(block); row < partial.end(block); ++row) {
    typename Norm::template Held<1, 1, false> held;
    held.load(norm, norm.row(row), 0, column, true, partial.columns);
    held.load_statistics(norm, row);
    total += held.product(0, 0) * held.r;
  }
  partial.sums[block * partial.columns + column] = total;
}

// Queues the kernels of rows too long to be held. Of Norm: row, kCentred and Held<1, N, false>.
template <int N, class Norm>
void queue_norm_long_backward(const Context& context, const char* name, const Norm& norm, const RowGrid& grid,
                              const PartialSums& partial) {
  const std::int64_t tiles = (grid.length + RowGrid::kThreads - 1) / RowGrid::kThreads;
  if (norm.want_dweight) {  // before gradients, which may take the place of what it reads
    queue_kernel(context, name, norm_long_dweight_kernel<Norm>, partial.blocks() * tiles, RowGrid::kThreads, 0, norm,
                 partial, tiles);
  }
  queue_kernel(context, name, norm_long_backward_kernel<N, Norm>, grid.blocks(), RowGrid::kThreads, 0, norm, grid);
}

// Queues the pass over rows by vectors of N; dweight's sums are left in `partial`.
template <int N, class Norm>
void queue_norm_backward(const Context& context, const char* name, const Norm& norm, const PartialSums& partial) {
  const RowGrid grid(partial.rows, partial.columns, N);
  const auto queue = [&](const auto& rows, auto held) {
    if constexpr (held.value > 0) {
      queue_kernel(context, name, norm_backward_kernel<held.value, N, std::remove_cvref_t<decltype(rows)>, Norm>,
                   partial.blocks(), RowGrid::kThreads, backward_shared<held.value, N>(rows), norm, rows, partial);
    } else {
      queue_norm_long_backward<N>(context, name, norm, grid, partial);
    }
  };
  if constexpr (Norm::kWholeRows) {
    with_rows<N>(grid, grid.length % N == 0, queue);
  } else {
    with_held_vectors(grid, [&](auto held) { queue(grid, held); });
  }
}

// The Norm of rms_norm and, with kLessMean, of layer_norm, where x is taken less its row's mean.
template <class T, bool kLessMean>
struct NormBackward {
  static constexpr bool kCentred = kLessMean, kWholeRows = false;
  Operand<T> x, dy, dx;
  WeightVector weight;
  const float* statistics[kLessMean ? 2 : 1];  // of each row: [mean,] 1 / root mean square
  bool accumulate_dx, want_dweight;

  struct Row {
    const T *x, *dy;
    T* dx;
  };
  __device__ __forceinline__ Row row(std::int64_t i) const { return {x.at(i, 0), dy.at(i, 0), dx.at(i, 0)}; }

  template <int kHeld, int N, bool>
  struct Held {
    Vector<T, N> x[kHeld], dy[kHeld], before[kHeld];  // before: what dx is added to
    float r, mean;

    __device__ __forceinline__ void load(const NormBackward& t, const Row& from, int i, std::int64_t column, bool whole,
                                         std::int64_t length) {
      x[i] = load_vector<N>(from.x, column, whole, length);
      dy[i] = load_vector<N>(from.dy, column, whole, length);  // 0 behind the row's end
      if (t.accumulate_dx) before[i] = load_vector<N>(from.dx, column, whole, length);
    }
    __device__ __forceinline__ void load_statistics(const NormBackward& t, std::int64_t row) {
      r = t.statistics[kLessMean ? 1 : 0][row];
      mean = kLessMean ? t.statistics[0][row] : 0.0f;
    }
    __device__ __forceinline__ float element(int i, int j) const { return x[i][j] - mean; }
    __device__ __forceinline__ float product(int i, int j) const { return dy[i][j] * element(i, j); }
    __device__ __forceinline__ float weighted(int i, int j, float w) const {
      return kLessMean ? dy[i][j] * w * element(i, j) : product(i, j) * w;
    }
    template <class Weight>
    __device__ __forceinline__ void write(const NormBackward& t, const Row& to, int i, std::int64_t column, bool whole,
                                          std::int64_t length, const Weight& weight, float pull, float mean_u) const {
      float out[N];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float u = dy[i][j] * weight[i][j], own = element(i, j);
        out[j] = (u - mean_u) * r - own * pull;
        if (t.accumulate_dx) out[j] += before[i][j];
      }
      store_vector<N>(to.dx, column, whole, length, Vector<T, N>::of(out));
    }
  };
};

}  // namespace flashgla::ops::cuda
