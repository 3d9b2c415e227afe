// Rows of which a team of lanes of a warp holds all channels, whole vectors a thread: each tensor moves once, by 16
// bytes at a time.
#pragma once

#include "flashgla/ops/cuda/each_element.cuh"
#include "flashgla/ops/cuda/math.cuh"
#include "flashgla/ops/feature_map/feature_map.h"

namespace flashgla::ops::feature_map::cuda {

using ops::cuda::Operand;
using ops::cuda::Vector;

// How such rows are shared out.
struct HeldGrid {
  static constexpr int kThreads = 256, kLanes = 32, kMost = 4;  // kMost: vectors that a thread holds
  std::int64_t rows;
  int channels;
  int lanes;    // of a row, a power of two
  int vectors;  // of a row; thread i has vectors i, i + lanes, ..

  HeldGrid(std::int64_t row_count, int channel_count, int elements)
      : rows(row_count), channels(channel_count), lanes(1), vectors(channel_count / elements) {
    while (lanes < kLanes && lanes < vectors) lanes *= 2;
  }
  int held() const { return (vectors + lanes - 1) / lanes; }
  // Where a team takes `together` rows next to each other.
  std::int64_t blocks(int together) const {
    const std::int64_t teams = (rows + together - 1) / together, each = kThreads / lanes;
    return (teams + each - 1) / each;
  }
};

// A thread's place in its team; warp-wide exchanges, in which every thread of the warp takes part.
struct Team {
  int lanes, rank;
  std::int64_t index;

  __device__ __forceinline__ explicit Team(const HeldGrid& grid)
      : lanes(grid.lanes),
        rank(static_cast<int>(threadIdx.x) & (grid.lanes - 1)),
        index((std::int64_t{blockIdx.x} * HeldGrid::kThreads + threadIdx.x) / static_cast<unsigned>(grid.lanes)) {}

  __device__ __forceinline__ float sum(float x) const {
    for (int distance = lanes / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
  }
  __device__ __forceinline__ float largest(float x) const {
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
    }
    return x;
  }
  // What thread `of` of the team has.
  __device__ __forceinline__ float from(int of, float x) const { return __shfl_sync(0xffffffffu, x, of, lanes); }
};

// Calls body(i, column) for a thread's vectors of N that are in the row.
template <int kHeld, int N, class Body>
__device__ __forceinline__ void for_each_held(const HeldGrid& grid, const Team& team, const Body& body) {
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int vector = i * team.lanes + team.rank;
    if (vector < grid.vectors) body(i, vector * N);
  }
}

// e^x; of bf16 to 2^-24 |x|, in three instructions.
template <class T>
__device__ __forceinline__ float exponential(float x) {
  if constexpr (sizeof(T) == 4) {
    return expf(x);
  } else {
    return ops::cuda::power_of_two(1.44269504f * x);
  }
}

// The features of a thread's channels: kParts of each (both signs', one's own otherwise), times `scale`.
template <Map kMap, int kHeld, int N>
struct HeldFeatures {
  static constexpr int kParts = kMap == Map::both_signs ? 2 : 1;
  float phi[kParts][kHeld][N];
  float divided = 1.0f;  // 1 / (sum + epsilon), or 1

  template <class T>
  __device__ __forceinline__ HeldFeatures(const HeldGrid& grid, const Team& team, const Vector<T, N> (&x)[kHeld],
                                          bool divide) {
    float largest = 0.0f, sum = 0.0f;
    if constexpr (kMap == Map::both_signs) {
      for_each_held<kHeld, N>(grid, team, [&](int i, int) {
#pragma unroll
        for (int j = 0; j < N; ++j) largest = fmaxf(largest, 2.0f * fabsf(x[i][j]));
      });
      largest = team.largest(largest);
    }
    for_each_held<kHeld, N>(grid, team, [&](int i, int) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float value = x[i][j];
        if constexpr (kMap == Map::as_is) {
          phi[0][i][j] = value;
        } else if constexpr (kMap == Map::relu) {
          phi[0][i][j] = fmaxf(value, 0.0f);
        } else if constexpr (kMap == Map::elu_plus_one) {
          phi[0][i][j] = value > 0.0f ? value + 1.0f : exponential<T>(value);
        } else {
          phi[0][i][j] = exponential<T>(2.0f * value - largest);
          phi[1][i][j] = exponential<T>(-2.0f * value - largest);
        }
#pragma unroll
        for (int part = 0; part < kParts; ++part) sum += phi[part][i][j];
      }
    });
    if constexpr (kMap == Map::both_signs) {  // whose sum is then 1
      const float scale = 1.0f / team.sum(sum);
      sum = 0.0f;
      for_each_held<kHeld, N>(grid, team, [&](int i, int) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
#pragma unroll
          for (int j = 0; j < N; ++j) sum += phi[part][i][j] *= scale;
        }
      });
    }
    if (divide) divided = 1.0f / (team.sum(sum) + static_cast<float>(kSumEpsilon));
  }
};

template <int kHeld, int N, class T>
__device__ __forceinline__ void load_row(const HeldGrid& grid, const Team& team, const T* row,
                                         Vector<T, N> (&out)[kHeld]) {
  for_each_held<kHeld, N>(grid, team, [&](int i, int column) { out[i] = Vector<T, N>::load(row + column); });
}

constexpr int rows_together(int held) { return held == 1 ? 2 : 1; }

template <class T, Map kMap, int kHeld>
__global__ void __launch_bounds__(HeldGrid::kThreads)
    held_forward_kernel(Operand<T> x, Operand<T> y, HeldGrid grid, bool divide) {
  flashgla::cuda::release_next_of_waves();
  flashgla::cuda::wait_for_previous();
  constexpr int N = flashgla::cuda::kVectorOf<T>, kRows = rows_together(kHeld);
  const Team team(grid);
  Vector<T, N> held[kRows][kHeld];
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) held[k][i] = Vector<T, N>::zero();
    const std::int64_t row = team.index * kRows + k;
    if (row < grid.rows) load_row(grid, team, x.at(row, 0), held[k]);
  }
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const HeldFeatures<kMap, kHeld, N> features(grid, team, held[k], divide);
    const std::int64_t row = team.index * kRows + k;
    if (row >= grid.rows) continue;
    T* to = y.at(row, 0);
    for_each_held<kHeld, N>(grid, team, [&](int i, int column) {
#pragma unroll
      for (int part = 0; part < features.kParts; ++part) {
        float out[N];
#pragma unroll
        for (int j = 0; j < N; ++j) out[j] = features.phi[part][i][j] * features.divided;
        Vector<T, N>::of(out).store(to + part * grid.channels + column);
      }
    });
  }
}

// As backward_row of row.h.
template <class T, Map kMap, int kHeld>
__global__ void __launch_bounds__(HeldGrid::kThreads)
    held_backward_kernel(Operand<T> x, Operand<T> dy, Operand<T> dx, HeldGrid grid, bool divide) {
  flashgla::cuda::release_next_of_waves();
  flashgla::cuda::wait_for_previous();
  constexpr int N = flashgla::cuda::kVectorOf<T>;
  using Features = HeldFeatures<kMap, kHeld, N>;
  constexpr int kParts = Features::kParts;
  const Team team(grid);
  const std::int64_t row = team.index;
  const bool there = row < grid.rows;
  Vector<T, N> held[kHeld], gradient[kParts][kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    held[i] = Vector<T, N>::zero();
#pragma unroll
    for (int part = 0; part < kParts; ++part) gradient[part][i] = Vector<T, N>::zero();
  }
  if (there) {
    load_row(grid, team, x.at(row, 0), held);
#pragma unroll
    for (int part = 0; part < kParts; ++part) load_row(grid, team, dy.at(row, part * grid.channels), gradient[part]);
  }
  const Features features(grid, team, held, divide);
  float dot = 0.0f;
  if (divide || kMap == Map::both_signs) {
    for_each_held<kHeld, N>(grid, team, [&](int i, int) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int j = 0; j < N; ++j) dot += gradient[part][i][j] * features.phi[part][i][j];
      }
    });
    dot = team.sum(dot);
  }
  if (!there) return;
  const float pull = divide ? dot * features.divided : 0.0f, mean = (dot - pull) * features.divided;
  T* to = dx.at(row, 0);
  for_each_held<kHeld, N>(grid, team, [&](int i, int column) {
    float out[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float own = (gradient[0][i][j] - pull) * features.divided, value = held[i][j];
      if constexpr (kMap == Map::as_is) {
        out[j] = own;
      } else if constexpr (kMap == Map::relu) {
        out[j] = value > 0.0f ? own : 0.0f;
      } else if constexpr (kMap == Map::elu_plus_one) {
        out[j] = value > 0.0f ? own : own * features.phi[0][i][j];
      } else {
        const float other = (gradient[1][i][j] - pull) * features.divided;
        out[j] = 2.0f * (features.phi[0][i][j] * (own - mean) - features.phi[1][i][j] * (other - mean));
      }
    }
    Vector<T, N>::of(out).store(to + column);
  });
}

// dpfp of a thread's vector of channels: r = (max(x, 0), max(-x, 0)), the second half behind the first, and the
// kShifts elements before the vector's in each half. In front of a half lies the other one's end: of the same x with
// its sign turned.
template <int N>
struct Rectified {
  static constexpr int kBefore = static_cast<int>(kShifts);
  static_assert(N >= kBefore);
  float x[kBefore + N];

  template <class T>
  __device__ __forceinline__ Rectified(const HeldGrid& grid, const Team& team, const Vector<T, N>& own) {
    const bool is_first = team.rank == 0;
    const int before = is_first ? grid.vectors - 1 : team.rank - 1;
#pragma unroll
    for (int j = 0; j < kBefore; ++j) {
      const float other = team.from(before, own[N - kBefore + j]);
      x[j] = is_first ? -other : other;
    }
#pragma unroll
    for (int j = 0; j < N; ++j) x[kBefore + j] = own[j];
  }
  // r of element i of the vector in a half; i from -kBefore on.
  __device__ __forceinline__ float of(int half, int i) const {
    return fmaxf(half == 0 ? x[kBefore + i] : -x[kBefore + i], 0.0f);
  }
  // The row's sum of products of r_i and r_(i-j), all j, of which there are kShifts.
  __device__ __forceinline__ float sum_of_features(const HeldGrid& grid, const Team& team) const {
    float sum = 0.0f;
    if (team.rank < grid.vectors) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          float before = 0.0f;
#pragma unroll
          for (int j = 1; j <= kBefore; ++j) before += of(half, i - j);
          sum = fmaf(of(half, i), before, sum);
        }
      }
    }
    return team.sum(sum);
  }
};

template <class T>
__global__ void __launch_bounds__(HeldGrid::kThreads)
    dpfp_forward_kernel(Operand<T> x, Operand<T> y, HeldGrid grid, bool divide) {
  flashgla::cuda::release_next_of_waves();
  flashgla::cuda::wait_for_previous();
  constexpr int N = flashgla::cuda::kVectorOf<T>;
  const Team team(grid);
  const bool there = team.index < grid.rows && team.rank < grid.vectors;
  const int column = team.rank * N;
  const auto held = there ? x.template load<N>(team.index, column) : Vector<T, N>::zero();
  const Rectified<N> r(grid, team, held);
  const float divided = divide ? 1.0f / (r.sum_of_features(grid, team) + static_cast<float>(kSumEpsilon)) : 1.0f;
  if (!there) return;
  T* to = y.at(team.index, column);
#pragma unroll
  for (int j = 1; j <= r.kBefore; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float out[N];
#pragma unroll
      for (int i = 0; i < N; ++i) out[i] = r.of(half, i) * r.of(half, i - j) * divided;
      Vector<T, N>::of(out).store(to);
      to += grid.channels;
    }
  }
}

template <class T>
__global__ void __launch_bounds__(HeldGrid::kThreads)
    dpfp_backward_kernel(Operand<T> x, Operand<T> dy, Operand<T> dx, HeldGrid grid, bool divide) {
  flashgla::cuda::release_next_of_waves();
  flashgla::cuda::wait_for_previous();
  constexpr int N = flashgla::cuda::kVectorOf<T>, kBefore = Rectified<N>::kBefore;
  const Team team(grid);
  const bool there = team.index < grid.rows && team.rank < grid.vectors;
  const int column = team.rank * N;
  auto held = Vector<T, N>::zero();
  Vector<T, N> gradient[kBefore][2];  // of shift j + 1, by halves
  const T* from = there ? dy.at(team.index, column) : nullptr;
  if (there) held = x.template load<N>(team.index, column);
#pragma unroll
  for (int j = 0; j < kBefore; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      gradient[j][half] = there ? Vector<T, N>::load(from) : Vector<T, N>::zero();
      from += grid.channels;
    }
  }
  const Rectified<N> r(grid, team, held);
  float pull = 0.0f, divided = 1.0f;
  if (divide) {
    divided = 1.0f / (r.sum_of_features(grid, team) + static_cast<float>(kSumEpsilon));
    float dot = 0.0f;
#pragma unroll
    for (int j = 0; j < kBefore; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < N; ++i) dot += gradient[j][half][i] * (r.of(half, i) * r.of(half, i - j - 1));
      }
    }
    pull = team.sum(dot) * divided;
  }
  // To r_i: y's gradients of shift j at i times r_(i-j), and at i + j times r_(i+j), which the next vector may have.
  float to_r[2][N] = {}, to_before[2][kBefore] = {};  // to_before[i]: of i - kBefore, the vector's before
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int j = 1; j <= kBefore; ++j) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float of_y = (gradient[j - 1][half][i] - pull) * divided, back = of_y * r.of(half, i);
        to_r[half][i] = fmaf(of_y, r.of(half, i - j), to_r[half][i]);
        if (i >= j) {
          to_r[half][i - j] += back;
        } else {
          to_before[half][i - j + kBefore] += back;
        }
      }
    }
  }
  const bool is_last = team.rank == grid.vectors - 1;
#pragma unroll
  for (int i = 0; i < kBefore; ++i) {
    const int next = is_last ? 0 : team.rank + 1;
    const float first = team.from(next, to_before[0][i]), second = team.from(next, to_before[1][i]);
    to_r[0][N - kBefore + i] += is_last ? second : first;  // behind a half comes the other one
    to_r[1][N - kBefore + i] += is_last ? first : second;
  }
  if (!there) return;
  float out[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float value = held[i];
    out[i] = value > 0.0f ? to_r[0][i] : value < 0.0f ? -to_r[1][i] : 0.0f;
  }
  dx.template store<N>(team.index, column, out);
}

}  // namespace flashgla::ops::feature_map::cuda
