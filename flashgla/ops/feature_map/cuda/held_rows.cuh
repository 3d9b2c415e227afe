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
  static constexpr int kThreads = 128, kLanes = 32, kMost = 4;  // kMost: vectors that a thread holds
  std::int64_t rows;
  int channels;
  int shift = 0;  // lanes of a row are 2^shift
  int vectors;    // of a row; thread i has vectors i, i + lanes, ..

  HeldGrid(std::int64_t row_count, int channel_count, int elements)
      : rows(row_count), channels(channel_count), vectors(channel_count / elements) {
    while (lanes() < kLanes && lanes() < vectors) ++shift;
  }
  __host__ __device__ __forceinline__ int lanes() const { return 1 << shift; }
  int held() const { return (vectors + lanes() - 1) / lanes(); }
  // Where a team takes `together` rows next to each other.
  std::int64_t blocks(int together) const {
    const std::int64_t teams = (rows + together - 1) / together, each = kThreads / lanes();
    return (teams + each - 1) / each;
  }
  // The row, or the last one, which may be read again but not written, where it is not there.
  __device__ __forceinline__ std::int64_t readable(std::int64_t row) const { return row < rows ? row : rows - 1; }
};

// A thread's place in its team; warp-wide exchanges, in which every thread of the warp takes part.
struct Team {
  int lanes, rank;
  std::int64_t index;

  __device__ __forceinline__ explicit Team(const HeldGrid& grid)
      : lanes(grid.lanes()),
        rank(static_cast<int>(threadIdx.x) & (lanes - 1)),
        index((std::int64_t{blockIdx.x} * HeldGrid::kThreads + threadIdx.x) >> grid.shift) {}

  template <class Join>
  __device__ __forceinline__ float joined(float x, const Join& join) const {
#pragma unroll
    for (int distance = HeldGrid::kLanes / 2; distance > 0; distance /= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, x, distance);
      x = distance < lanes ? join(x, other) : x;
    }
    return x;
  }
  __device__ __forceinline__ float sum(float x) const {
    return joined(x, [](float a, float b) { return a + b; });
  }
  __device__ __forceinline__ float largest(float x) const {
    return joined(x, [](float a, float b) { return fmaxf(a, b); });
  }
  // What thread `of` of the team has.
  template <class X>
  __device__ __forceinline__ X from(int of, X x) const {
    return __shfl_sync(0xffffffffu, x, (static_cast<int>(threadIdx.x) & (HeldGrid::kLanes - lanes)) | of);
  }
};

// A thread's vectors of N channels. In the place of one behind the row's end stands the row's last, which is read, but
// neither added nor written: no load waits for a test.
template <int kHeld, int N>
struct Places {
  int column[kHeld];
  bool there[kHeld];

  __device__ __forceinline__ Places(const HeldGrid& grid, const Team& team) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int vector = i * team.lanes + team.rank;
      there[i] = vector < grid.vectors;
      column[i] = (there[i] ? vector : grid.vectors - 1) * N;
    }
  }

  template <class T>
  __device__ __forceinline__ void load(const T* row, Vector<T, N> (&out)[kHeld]) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) out[i] = Vector<T, N>::load(row + column[i]);
  }
  // What add(i, total) makes of the totals of the vectors before, over those that are there.
  template <class Add>
  __device__ __forceinline__ float sum(const Add& add) const {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const float with = add(i, total);
      total = there[i] ? with : total;
    }
    return total;
  }
};

// e^x; of bf16 to 2^-24 |x|, in three instructions.
template <class T>
__device__ __forceinline__ float exponential(float x) {
  if constexpr (sizeof(T) == 4) {
    return expf(x);
  } else {
    return ops::cuda::power_of_two(1.44269504f * x);
  }
}

// The largest of the elements' absolute values; of bf16 two at a time.
template <class T, int N>
__device__ __forceinline__ float largest_of(const Vector<T, N>& x) {
  float largest = 0.0f;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int j = 0; j < N; ++j) largest = fmaxf(largest, fabsf(x[j]));
  } else {
    std::uint32_t both = 0;
#pragma unroll
    for (int i = 0; i < x.kWords; ++i) {
      asm("max.bf16x2 %0, %0, %1;" : "+r"(both) : "r"(x.words[i] & 0x7fff7fffu));
    }
    largest = fmaxf(__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000u));
  }
  return largest;
}

// The features of a thread's channels: kParts of each (both signs', one's own otherwise), times `scale`.
template <Map kMap, int kHeld, int N, bool kDivide>
struct HeldFeatures {
  static constexpr int kParts = kMap == Map::both_signs ? 2 : 1;
  float phi[kParts][kHeld][N];
  float divided = 1.0f;  // 1 / (sum + epsilon), or 1

  template <class T>
  __device__ __forceinline__ HeldFeatures(const Team& team, const Places<kHeld, N>& places,
                                          const Vector<T, N> (&x)[kHeld]) {
    float largest = 0.0f;
    if constexpr (kMap == Map::both_signs) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) largest = fmaxf(largest, largest_of(x[i]));
      largest = team.largest(2.0f * largest);
    }
    float sum = places.sum([&](int i, float total) {
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
        for (int part = 0; part < kParts; ++part) total += phi[part][i][j];
      }
      return total;
    });
    if constexpr (kMap == Map::both_signs) {  // whose sum is then 1
      const float scale = 1.0f / team.sum(sum);
      sum = places.sum([&](int i, float total) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
#pragma unroll
          for (int j = 0; j < N; ++j) total += phi[part][i][j] *= scale;
        }
        return total;
      });
    }
    if constexpr (kDivide) divided = 1.0f / (team.sum(sum) + static_cast<float>(kSumEpsilon));
  }
};

constexpr int rows_together(int held) { return held == 1 ? 2 : 1; }

template <class T, Map kMap, int kHeld, bool kDivide>
__global__ void __launch_bounds__(HeldGrid::kThreads) held_forward_kernel(Operand<T> x, Operand<T> y, HeldGrid grid) {
  flashgla::cuda::release_next_of_waves();
  flashgla::cuda::wait_for_previous();
  constexpr int N = flashgla::cuda::kVectorOf<T>, kRows = rows_together(kHeld);
  const Team team(grid);
  const Places<kHeld, N> places(grid, team);
  Vector<T, N> held[kRows][kHeld];
#pragma unroll
  for (int k = 0; k < kRows; ++k) places.load(x.at(grid.readable(team.index * kRows + k), 0), held[k]);
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const HeldFeatures<kMap, kHeld, N, kDivide> features(team, places, held[k]);
    const std::int64_t row = team.index * kRows + k;
    if (row >= grid.rows) continue;
    T* to = y.at(row, 0);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
#pragma unroll
      for (int part = 0; part < features.kParts; ++part) {
        float out[N];
#pragma unroll
        for (int j = 0; j < N; ++j) out[j] = features.phi[part][i][j] * features.divided;
        if (places.there[i]) Vector<T, N>::of(out).store(to + part * grid.channels + places.column[i]);
      }
    }
  }
}

// As backward_row of row.h.
template <class T, Map kMap, int kHeld, bool kDivide>
__global__ void __launch_bounds__(HeldGrid::kThreads)
    held_backward_kernel(Operand<T> x, Operand<T> dy, Operand<T> dx, HeldGrid grid) {
  flashgla::cuda::release_next_of_waves();
  flashgla::cuda::wait_for_previous();
  constexpr int N = flashgla::cuda::kVectorOf<T>, kRows = rows_together(kHeld);
  using Features = HeldFeatures<kMap, kHeld, N, kDivide>;
  constexpr int kParts = Features::kParts;
  const Team team(grid);
  const Places<kHeld, N> places(grid, team);
  Vector<T, N> held[kRows][kHeld], gradients[kRows][kParts][kHeld];
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const std::int64_t row = grid.readable(team.index * kRows + k);
    places.load(x.at(row, 0), held[k]);
    const T* from = dy.at(row, 0);
#pragma unroll
    for (int part = 0; part < kParts; ++part) places.load(from + part * grid.channels, gradients[k][part]);
  }
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const Features features(team, places, held[k]);
    const auto& gradient = gradients[k];
    float dot = 0.0f;
    if constexpr (kDivide || kMap == Map::both_signs) {
      dot = team.sum(places.sum([&](int i, float total) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
#pragma unroll
          for (int j = 0; j < N; ++j) total += gradient[part][i][j] * features.phi[part][i][j];
        }
        return total;
      }));
    }
    const std::int64_t row = team.index * kRows + k;
    if (row >= grid.rows) continue;
    const float pull = kDivide ? dot * features.divided : 0.0f, mean = (dot - pull) * features.divided;
    T* to = dx.at(row, 0);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      float out[N];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float own = (gradient[0][i][j] - pull) * features.divided, value = held[k][i][j];
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
      if (places.there[i]) Vector<T, N>::of(out).store(to + places.column[i]);
    }
  }
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
    constexpr int kWords = kBefore * own.kWords / N;  // that the elements before lie in
    Vector<T, kBefore> others;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const std::uint32_t other = team.from(before, own.words[own.kWords - kWords + i]);
      others.words[i] = is_first ? other ^ (sizeof(T) == 4 ? 0x80000000u : 0x80008000u) : other;
    }
#pragma unroll
    for (int j = 0; j < kBefore; ++j) x[j] = others[j];
#pragma unroll
    for (int j = 0; j < N; ++j) x[kBefore + j] = own[j];
  }
  // r of element i of the vector in a half; i from -kBefore on.
  __device__ __forceinline__ float of(int half, int i) const {
    return fmaxf(half == 0 ? x[kBefore + i] : -x[kBefore + i], 0.0f);
  }
  // The row's sum of products of r_i and r_(i-j), all j, of which there are kShifts.
  __device__ __forceinline__ float sum_of_features(const Team& team, const Places<1, N>& places) const {
    return team.sum(places.sum([&](int, float total) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          float before = 0.0f;
#pragma unroll
          for (int j = 1; j <= kBefore; ++j) before += of(half, i - j);
          total = fmaf(of(half, i), before, total);
        }
      }
      return total;
    }));
  }
};

template <class T, bool kDivide>
__global__ void __launch_bounds__(HeldGrid::kThreads) dpfp_forward_kernel(Operand<T> x, Operand<T> y, HeldGrid grid) {
  flashgla::cuda::release_next_of_waves();
  flashgla::cuda::wait_for_previous();
  constexpr int N = flashgla::cuda::kVectorOf<T>;
  const Team team(grid);
  const Places<1, N> places(grid, team);
  const auto held = x.template load<N>(grid.readable(team.index), places.column[0]);
  const Rectified<N> r(grid, team, held);
  float divided = 1.0f;
  if constexpr (kDivide) divided = 1.0f / (r.sum_of_features(team, places) + static_cast<float>(kSumEpsilon));
  if (!places.there[0] || team.index >= grid.rows) return;
  T* to = y.at(team.index, places.column[0]);
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

template <class T, bool kDivide>
__global__ void __launch_bounds__(HeldGrid::kThreads)
    dpfp_backward_kernel(Operand<T> x, Operand<T> dy, Operand<T> dx, HeldGrid grid) {
  flashgla::cuda::release_next_of_waves();
  flashgla::cuda::wait_for_previous();
  constexpr int N = flashgla::cuda::kVectorOf<T>, kBefore = Rectified<N>::kBefore;
  const Team team(grid);
  const Places<1, N> places(grid, team);
  const int column = places.column[0];
  const auto held = x.template load<N>(grid.readable(team.index), column);
  Vector<T, N> gradient[kBefore][2];  // of shift j + 1, by halves
  const T* from = dy.at(grid.readable(team.index), column);
#pragma unroll
  for (int j = 0; j < kBefore; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      gradient[j][half] = Vector<T, N>::load(from);
      from += grid.channels;
    }
  }
  const Rectified<N> r(grid, team, held);
  float pull = 0.0f, divided = 1.0f;
  if constexpr (kDivide) {
    divided = 1.0f / (r.sum_of_features(team, places) + static_cast<float>(kSumEpsilon));
    pull = divided * team.sum(places.sum([&](int, float total) {
#pragma unroll
      for (int j = 0; j < kBefore; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int i = 0; i < N; ++i) total += gradient[j][half][i] * (r.of(half, i) * r.of(half, i - j - 1));
        }
      }
      return total;
    }));
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
  if (!places.there[0] || team.index >= grid.rows) return;
  float out[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float value = held[i];
    out[i] = value > 0.0f ? to_r[0][i] : value < 0.0f ? -to_r[1][i] : 0.0f;
  }
  dx.template store<N>(team.index, column, out);
}

}  // namespace flashgla::ops::feature_map::cuda
