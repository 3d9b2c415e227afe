// Kernels that work on a row at a time: a team of threads holds a row in registers, so that each tensor moves once;
// rows longer than that are read again from the cache.
#pragma once

#include <algorithm>
#include <type_traits>

#include "flashgla/base/cuda/sums.cuh"
#include "flashgla/ops/cuda/each_element.cuh"
#include "flashgla/ops/cuda/partial_sums.cuh"

namespace flashgla::ops::cuda {

using flashgla::cuda::Team;

// How rows of `length` are shared out: every thread takes vectors of N elements, `team` * N apart.
struct RowGrid {
  static constexpr int kThreads = 256;
  std::int64_t rows, length;
  int team;     // threads, a power of two from 32 to kThreads
  int vectors;  // a thread's

  static constexpr int kMost = 4;  // vectors that a thread holds

  RowGrid(std::int64_t rows_count, std::int64_t row_length, int elements) : rows(rows_count), length(row_length) {
    const std::int64_t count = (length + elements - 1) / elements;
    team = flashgla::cuda::kWarp;
    while (team < kThreads && team * 2 < count) team *= 2;
    vectors = static_cast<int>(std::min<std::int64_t>((count + team - 1) / team, 1 << 30));
  }
  bool held() const { return vectors <= kMost; }
  __host__ __device__ int teams() const { return kThreads / team; }  // in a block
  std::int64_t blocks() const { return (rows + teams() - 1) / teams(); }
  static constexpr int kSharedFloats = 2 * kThreads / flashgla::cuda::kWarp;
};

// Blocks of rows whose sums are partial, in backward kernels: two for each multiprocessor of a large GPU, which is how
// many find room there at once.
constexpr std::int64_t kRowBlocks = 264;
constexpr int kBackwardBlocksEach = 2;

// Sums over x's rows for such kernels: of as many blocks, but for all teams to have equally many rows, where the number
// of rows allows it. By the shape alone, whatever is aligned.
inline PartialSums take_sums_of_rows(Context& context, const TensorView& x, const char* label) {
  const Rows rows(x);
  const RowGrid grid(rows.count(), rows.length(), 16 / static_cast<int>(size_of(x.dtype)));
  return take_partial_sums(context, grid.rows, grid.length, kRowBlocks, grid.teams(), label);
}

// Calls run(integral_constant) with how many vectors a thread holds: 1, 2 or 4, and 0 where they are too many.
template <class Run>
void with_held_vectors(const RowGrid& grid, const Run& run) {
  if (!grid.held()) return run(std::integral_constant<int, 0>());
  if (grid.vectors == 1) return run(std::integral_constant<int, 1>());
  if (grid.vectors == 2) return run(std::integral_constant<int, 2>());
  run(std::integral_constant<int, RowGrid::kMost>());
}

// In kernels: calls body(i, column, whole) for a thread's vectors of a row: i-th of those it holds (0 when they are not
// held), begins at `column`, and is wholly inside the row or, with whole false, its end. kHeld as above.
template <int kHeld, int N, class Body>
__device__ __forceinline__ void for_each_vector(const RowGrid& grid, int rank, const Body& body) {
  if constexpr (kHeld > 0) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const std::int64_t column = (static_cast<std::int64_t>(i) * grid.team + rank) * N;
      if (column < grid.length) body(i, column, column + N <= grid.length);
    }
  } else {
    for (int i = 0; i < grid.vectors; ++i) {
      const std::int64_t column = (static_cast<std::int64_t>(i) * grid.team + rank) * N;
      if (column < grid.length) body(0, column, column + N <= grid.length);
    }
  }
}

// Rows that are whole vectors, all of them aligned, and whose team the compiler knows: fewer registers and
// instructions. Measured to pay where the registers are used for more; rms_norm and layer_norm backward were slower.
template <int kTeam>
struct WholeRows {
  static constexpr int team = kTeam;
  std::int64_t rows, length;
  int vectors;  // of a row

  template <int N>
  static WholeRows of(const RowGrid& grid) {
    return {grid.rows, grid.length, static_cast<int>(grid.length) / N};
  }
  __device__ static constexpr int teams() { return RowGrid::kThreads / kTeam; }
};

template <int kHeld, int N, int kTeam, class Body>
__device__ __forceinline__ void for_each_vector(const WholeRows<kTeam>& grid, int rank, const Body& body) {
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int vector = i * kTeam + rank;
    if (vector < grid.vectors) body(i, std::int64_t{vector * N}, true);
  }
}

// Calls run(grid, held) with how many vectors a thread holds (as with_held_vectors), and with the rows as WholeRows
// where they are `whole`.
template <int N, class Run>
void with_rows(const RowGrid& grid, bool whole, const Run& run) {
  using One = std::integral_constant<int, 1>;
  using Two = std::integral_constant<int, 2>;
  using Most = std::integral_constant<int, RowGrid::kMost>;
  if (whole && grid.held()) {
    if (grid.vectors > 2) return run(WholeRows<256>::of<N>(grid), Most());
    if (grid.team == 256) return run(WholeRows<256>::of<N>(grid), Two());
    if (grid.team == 128) return run(WholeRows<128>::of<N>(grid), Two());
    if (grid.team == 64) return run(WholeRows<64>::of<N>(grid), Two());
    if (grid.vectors == 2) return run(WholeRows<32>::of<N>(grid), Two());
    return run(WholeRows<32>::of<N>(grid), One());
  }
  with_held_vectors(grid, [&](auto held) { run(grid, held); });
}

// A vector of which the elements beyond the row's end are zero, and are not written.
template <int N, class T>
__device__ __forceinline__ Vector<T, N> load_vector(const T* row, std::int64_t column, bool whole,
                                                    std::int64_t length) {
  if (whole) return Vector<T, N>::load(row + column);
  float values[N];
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = column + i < length ? flashgla::cuda::to_float(row[column + i]) : 0.0f;
  return Vector<T, N>::of(values);
}
template <int N, class T>
__device__ __forceinline__ void store_vector(T* row, std::int64_t column, bool whole, std::int64_t length,
                                             const Vector<T, N>& vector) {
  if (whole) return vector.store(row + column);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (column + i < length) row[column + i] = flashgla::cuda::from_float<T>(vector[i]);
  }
}

// A weight of f32 or bf16, or ones where it is absent, as f32.
struct WeightVector {
  const void* data;
  bool wide;     // f32
  bool aligned;  // vectors may be read at multiples of N

  template <int N>
  __device__ __forceinline__ void load(std::int64_t column, bool whole, std::int64_t length, float (&out)[N]) const {
    if (!data) {
#pragma unroll
      for (int i = 0; i < N; ++i) out[i] = 1.0f;
    } else if (wide) {
      load_as<N>(static_cast<const float*>(data), column, whole, length, out);
    } else {
      load_as<N>(static_cast<const __nv_bfloat16*>(data), column, whole, length, out);
    }
  }
  // N elements that are there and aligned, as they lie in memory.
  template <int N, class W>
  __device__ __forceinline__ Vector<W, N> packed(int column) const {
    if (data) return Vector<W, N>::load(static_cast<const W*>(data) + column);
    float ones[N];
#pragma unroll
    for (int i = 0; i < N; ++i) ones[i] = 1.0f;
    return Vector<W, N>::of(ones);
  }

 private:
  template <int N, class T>
  __device__ __forceinline__ void load_as(const T* from, std::int64_t column, bool whole, std::int64_t length,
                                          float (&out)[N]) const {
    if (aligned && whole) {
      const Vector<T, N> vector = Vector<T, N>::load(from + column);
#pragma unroll
      for (int i = 0; i < N; ++i) out[i] = vector[i];
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) out[i] = column + i < length ? flashgla::cuda::to_float(from[column + i]) : 0.0f;
    }
  }
};

inline WeightVector weight_vector(const TensorView& weight, int elements) {
  return {weight.data, weight.dtype == DType::f32, is_aligned(weight, elements)};
}

// The sums that a block's teams hold of their vectors' columns, into the block's row of `partial`. shared: kThreads *
// kHeld * N floats.
template <int kHeld, int N, class Grid>
__device__ __forceinline__ void store_sums(const Grid& grid, const Team& team, const PartialSums& partial,
                                           const float (&sums)[kHeld][N], float* shared) {
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
#pragma unroll
    for (int j = 0; j < N; ++j) shared[(i * N + j) * RowGrid::kThreads + threadIdx.x] = sums[i][j];
  }
  __syncthreads();
  if (team.index() != 0) return;
  for_each_vector<kHeld, N>(grid, team.rank(), [&](int i, std::int64_t column, bool) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float total = 0.0f;
      for (int other = 0; other < grid.teams(); ++other) {
        total += shared[(i * N + j) * RowGrid::kThreads + other * grid.team + team.rank()];
      }
      if (column + j < grid.length) partial.sums[blockIdx.x * partial.columns + column + j] = total;
    }
  });
}

}  // namespace flashgla::ops::cuda
