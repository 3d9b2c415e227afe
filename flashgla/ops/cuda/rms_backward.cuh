// The backward pass of root-mean-square norms over rows that a team of threads holds: rms_norm, rms_norm_swish_gate.
#pragma once

#include "flashgla/ops/cuda/rows_by_team.cuh"

namespace flashgla::ops::cuda {

// In kernels: teams take rows in turns, so that what all of them read at a time lies close together; the next row is on
// its way while one is worked on. Operands t has weight and want_dweight. Held is what a thread holds of a row:
// load(t, grid, rank, row), r (the row's 1 / root mean square), and product(i, j), what element j of its vector i adds
// to dweight but for r. store(held, row, pull, weight) writes the row's gradients, in which x is pulled by `pull` to
// zero.
template <int kHeld, int N, class Held, class Operands, class Store>
__device__ __forceinline__ void rms_backward(const Operands& t, const RowGrid& grid, const PartialSums& partial,
                                             float* shared, Team& team, const Store& store) {
  float weight[kHeld][N], sums[kHeld][N];
  for_each_vector<kHeld, N>(grid, team.rank(), [&](int i, std::int64_t column, bool whole) {
    t.weight.template load<N>(column, whole, grid.length, weight[i]);
  });
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
#pragma unroll
    for (int j = 0; j < N; ++j) sums[i][j] = 0.0f;
  }
  const std::int64_t end = partial.rows, apart = std::int64_t{gridDim.x} * grid.teams();
  std::int64_t row = std::int64_t{blockIdx.x} * grid.teams() + team.index();
  Held held, next;
  if (row < end) held.load(t, grid, team.rank(), row);
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
