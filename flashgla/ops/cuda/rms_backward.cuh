// The backward pass of root-mean-square norms over rows that a team of threads holds: rms_norm, rms_norm_swish_gate.
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

// In kernels, over RowGrid or WholeRows: teams take rows in turns, so that what all of them read at a time lies close
// together; the next row is on its way while one is worked on. Operands t has weight and want_dweight. Held is what a
// thread holds of a row: load(t, grid, rank, row), r (the row's 1 / root mean square), and product(i, j), what element
// j of its vector i adds to dweight but for r. store(held, row, pull, weight) writes the row's gradients, in which x is
// pulled by `pull` to zero.
template <int kHeld, int N, class Held, class Operands, class Grid, class Store>
__device__ __forceinline__ void rms_backward(const Operands& t, const Grid& grid, const PartialSums& partial,
                                             float* shared, Team& team, const Store& store) {
  const auto weight = weight_of<kHeld, N>(t.weight, grid, team.rank(), shared);
  float sums[kHeld][N];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
#pragma unroll
    for (int j = 0; j < N; ++j) sums[i][j] = 0.0f;
  }
  const std::int64_t end = partial.rows, apart = std::int64_t{gridDim.x} * grid.teams();
  std::int64_t row = std::int64_t{blockIdx.x} * grid.teams() + team.index();
  Held held, next;
  if (row < end) held.load(t, grid, team.rank(), row);
  weight.fill(t.weight);
  for (; row < end; row += apart) {
    if (row + apart < end) next.load(t, grid, team.rank(), row + apart);
    const float r = held.r;
    float dot = 0.0f;
    for_each_vector<kHeld, N>(grid, team.rank(), [&](int i, std::int64_t, bool) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float product = held.product(i, j);
        dot += product * weight[i][j];
        sums[i][j] += product * r;
      }
    });
    const float pull = r * r * r * (team.sum(dot) / static_cast<float>(grid.length));
    store(held, row, pull, weight);
    held = next;
  }
  flashgla::cuda::release_next();  // to the sums
  if (!t.want_dweight) return;
  __syncthreads();  // of the teams' sums, whose memory is taken
  store_sums<kHeld, N>(grid, team, partial, sums, shared);
}

}  // namespace flashgla::ops::cuda
