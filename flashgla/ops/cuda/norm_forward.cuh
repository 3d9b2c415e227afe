// The forward pass of norms over rows (rms_norm, layer_norm, rms_norm_swish_gate): kernels and their launches. Norm is
// what a kernel is called with, operands x and weight among them, and knows how y comes about:
//
//     kRows                            rows next to each other that threads hold at once, for all of which they read a
//                                      weight once
//     held_rows<kHeld, N, W>(grid)     y of the rows that a block holds (rows_by_block.cuh); W: the weights' type
//     long_row<N>(row, grid, team)     y of a row that a team reads again and again (rows_by_team.cuh)
#pragma once

#include "flashgla/ops/arguments.h"
#include "flashgla/ops/cuda/rows_by_block.cuh"
#include "flashgla/ops/cuda/rows_by_team.cuh"

namespace flashgla::ops::cuda {

template <int kHeld, int N, class W, class Norm>
__global__ void __launch_bounds__(BlockRows::kThreads) norm_forward_kernel(Norm norm, BlockRows grid) {
  flashgla::cuda::release_next_of_waves();
  flashgla::cuda::wait_for_previous();
  norm.template held_rows<kHeld, N, W>(grid);
}

// Rows that are too long to be held, or no whole vectors.
template <int N, class Norm>
__global__ void __launch_bounds__(RowGrid::kThreads) norm_long_forward_kernel(Norm norm, RowGrid grid) {
  flashgla::cuda::release_next_of_waves();
  flashgla::cuda::wait_for_previous();
  __shared__ float shared[RowGrid::kSharedFloats];
  Team team(grid.team, shared);
  const std::int64_t row = std::int64_t{blockIdx.x} * grid.teams() + team.index();
  if (row < grid.rows) norm.template long_row<N>(row, grid, team);  // whole teams
}

// In long_row: 1 / root mean square of the elements of x.
template <int N, class T>
__device__ __forceinline__ float inverse_rms(const T* x, const RowGrid& grid, Team& team, float epsilon) {
  float squares = 0.0f;
  for_each_vector<0, N>(grid, team.rank(), [&](int, std::int64_t column, bool whole) {
    const auto vector = load_vector<N>(x, column, whole, grid.length);
#pragma unroll
    for (int j = 0; j < N; ++j) squares += vector[j] * vector[j];
  });
  return rsqrtf(team.sum(squares) / static_cast<float>(grid.length) + epsilon);
}

// Queues the pass over x's rows by vectors of N. aligned: weights too may be read so.
template <int N, class Norm>
void queue_norm_forward(const Context& context, const char* name, const Norm& norm, const TensorView& x, bool aligned) {
  const std::int64_t rows = rows_of(x.shape), length = x.size(-1);
  const BlockRows grid(rows, length, N, length % N == 0 && aligned);
  if (grid.held() > 0) {
    return with_room(grid, norm.weight.wide, [&](auto held, auto weight) {
      queue_kernel(context, name, norm_forward_kernel<held.value, N, decltype(weight), Norm>, grid.blocks(Norm::kRows),
                   grid.threads(), 0, norm, grid);
    });
  }
  const RowGrid long_grid(rows, length, N);
  queue_kernel(context, name, norm_long_forward_kernel<N, Norm>, long_grid.blocks(), RowGrid::kThreads, 0, norm,
               long_grid);
}

}  // namespace flashgla::ops::cuda
