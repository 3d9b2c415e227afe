// Products of up to 16 rows with the transpose of a row-major matrix (decoding; from 5 f32 rows on with a bf16 matrix
// on tensor cores where rows lie in vectors of 16 bytes, few_rows_tensor_cores.cu): each warp walks some rows of b
// once, 16 bytes a lane and load, and multiplies them with all rows of a, which a block keeps in shared memory in f32.
// A row of c has the same bits whatever the number of rows.
#include <algorithm>

#include "flashgla/base/cuda/sums.cuh"
#include "flashgla/base/cuda/vectors.cuh"
#include "flashgla/ops/cuda/each_element.cuh"
#include "flashgla/ops/cuda/queue_kernel.cuh"
#include "flashgla/ops/cuda/with_element.cuh"
#include "flashgla/ops/matmul/cuda/few_rows.h"
#include "flashgla/ops/matmul/cuda/kernels.h"

namespace flashgla::ops::matmul::cuda {

namespace {

using flashgla::cuda::kVectorOf;
using flashgla::cuda::kWarp;
using flashgla::cuda::to_float;
using flashgla::cuda::Vector;

constexpr int kSharedBytes = 48 * 1024;

// For up to M rows of a: what a warp takes of b at once.
template <int M>
struct Shape {
  static constexpr int kWarps = M == 1 ? 4 : 8;
  static constexpr int kRows = M == 1 ? 2 : 4;                 // of b
  static constexpr int kAhead = M == 1 ? 4 : M == 16 ? 1 : 2;  // loads of each in flight
};

// Where element k of a chunk lies, so that a warp's 16-byte loads touch each bank once: of every 8 neighbours the first
// four stand with other lanes' first four.
template <int V>
__device__ __forceinline__ int place_of(int k) {
  if constexpr (V == 8) return k / 256 * 256 + k % 8 / 4 * 128 + k % 256 / 8 * 4 + k % 4;
  return k;
}

template <int V>
__device__ __forceinline__ void load_lane(float (&x)[V], const float* from, int lane) {
  if constexpr (V >= 4) {
#pragma unroll
    for (int part = 0; part < V / 4; ++part) {
      const float4 four = reinterpret_cast<const float4*>(from + part * 128)[lane];
      x[4 * part] = four.x;
      x[4 * part + 1] = four.y;
      x[4 * part + 2] = four.z;
      x[4 * part + 3] = four.w;
    }
  } else {
    x[0] = from[lane];
  }
}

// A chunk of a's rows to shared memory, with zeros beyond its rows and k. All rows' loads are under way at once.
template <int M, int V, class A, class B, class C>
__device__ __forceinline__ void fill_chunk(float* x, const FewRows<A, B, C>& p, std::int64_t chunk) {
  constexpr int kThreads = Shape<M>::kWarps * kWarp;
  if (V >= 4 && p.a_is_aligned) {
    constexpr int kRounds = M <= 4 ? 4 / M : 1;
    for (int first = 4 * threadIdx.x; first < p.chunk; first += kRounds * 4 * kThreads) {
      Vector<A, 4> read[kRounds][M];
#pragma unroll
      for (int round = 0; round < kRounds; ++round) {
        const std::int64_t k = chunk + first + round * 4 * kThreads;
#pragma unroll
        for (int m = 0; m < M; ++m) {
          read[round][m] = m < p.m && k < p.k ? Vector<A, 4>::load(p.a + m * p.a_row + k) : Vector<A, 4>::zero();
        }
      }
#pragma unroll
      for (int round = 0; round < kRounds; ++round) {
        const int i = first + round * 4 * kThreads;
        if (i >= p.chunk) break;
#pragma unroll
        for (int m = 0; m < M; ++m) {
          const Vector<A, 4>& four = read[round][m];
          *reinterpret_cast<float4*>(x + m * p.chunk + place_of<V>(i)) =
              make_float4(four[0], four[1], four[2], four[3]);
        }
      }
    }
    return;
  }
  for (int i = threadIdx.x; i < p.chunk; i += kThreads) {
    const std::int64_t k = chunk + i;
    float read[M];
#pragma unroll
    for (int m = 0; m < M; ++m) {
      read[m] = m < p.m && k < p.k ? to_float(p.a[m * p.a_row + k * p.a_column]) : 0.0f;
    }
#pragma unroll
    for (int m = 0; m < M; ++m) x[m * p.chunk + place_of<V>(i)] = read[m];
  }
}

// V: elements of b a lane loads at once.
template <int M, int V, class A, class B, class C>
__global__ void __launch_bounds__(Shape<M>::kWarps* kWarp) few_rows_kernel(const FewRows<A, B, C> p) {
  constexpr int kRows = Shape<M>::kRows, kAhead = Shape<M>::kAhead, kStep = kWarp * V;
  extern __shared__ float4 shared[];
  auto* x = reinterpret_cast<float*>(shared);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const std::int64_t first = (std::int64_t{blockIdx.x} * Shape<M>::kWarps + warp) * kRows;
  const B* rows[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) rows[r] = p.b + (first + r < p.n ? first + r : p.n - 1) * p.b_row + lane * V;

  float sums[M][kRows] = {};
  Vector<B, V> next[kAhead][kRows];
  const auto load = [&](std::int64_t begin) {
#pragma unroll
    for (int step = 0; step < kAhead; ++step) {
      const std::int64_t k = begin + step * kStep;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        next[step][r] = k + lane * V < p.k ? Vector<B, V>::load(rows[r] + k) : Vector<B, V>::zero();
      }
    }
  };
  flashgla::cuda::wait_for_previous();
  load(0);
  for (std::int64_t chunk = 0; chunk < p.k; chunk += p.chunk) {
    if (chunk > 0) __syncthreads();
    fill_chunk<M, V>(x, p, chunk);
    __syncthreads();
    const int end = static_cast<int>(p.k - chunk < p.chunk ? p.k - chunk : p.chunk);
    for (int k = 0; k < end; k += kAhead * kStep) {
      Vector<B, V> now[kAhead][kRows];
#pragma unroll
      for (int step = 0; step < kAhead; ++step) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) now[step][r] = next[step][r];
      }
      load(chunk + k + kAhead * kStep);
#pragma unroll
      for (int step = 0; step < kAhead; ++step) {
#pragma unroll
        for (int m = 0; m < M; ++m) {
          float values[V];
          load_lane<V>(values, x + m * p.chunk + k + step * kStep, lane);
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int j = 0; j < V; ++j) sums[m][r] += values[j] * now[step][r][j];
          }
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const std::int64_t n = first + r;
#pragma unroll
    for (int m = 0; m < M; ++m) {
      const float value = flashgla::cuda::warp_sum(sums[m][r]);
      if (lane != m || m >= p.m || n >= p.n) continue;
      finish(p, m, n, value);
    }
  }
}

template <int M, int V, class A, class B, class C>
void queue(Context& context, FewRows<A, B, C> p) {
  constexpr int kMultiple = Shape<M>::kAhead * kWarp * V;
  constexpr int kMost = kSharedBytes / 4 / M / kMultiple * kMultiple;
  static_assert(kMost > 0);
  p.chunk = static_cast<int>(std::min<std::int64_t>(kMost, (p.k + kMultiple - 1) / kMultiple * kMultiple));
  constexpr std::int64_t kBlockRows = Shape<M>::kWarps * Shape<M>::kRows;
  ops::cuda::queue_kernel(context, "matmul: few rows", few_rows_kernel<M, V, A, B, C>,
                          (p.n + kBlockRows - 1) / kBlockRows, Shape<M>::kWarps * kWarp,
                          M * p.chunk * static_cast<int>(sizeof(float)), p);
}

template <class A, class B, class C>
void multiply(Context& context, const TensorView& a, const TensorView& b, const TensorView& c, const Options& options) {
  const FewRows<A, B, C> p{static_cast<const A*>(a.data),
                           static_cast<const B*>(b.data),
                           static_cast<C*>(c.data),
                           options.bias.data,
                           options.bias.dtype == DType::bf16,
                           options.accumulate,
                           a.stride[1] == 1 && a.size(1) % 4 == 0 && ops::cuda::is_aligned(a, 4),
                           a.size(0),
                           b.size(1),
                           a.size(1),
                           a.stride[0],
                           a.stride[1],
                           b.stride[1],
                           c.stride[0],
                           c.stride[1],
                           0};
  constexpr int kWide = kVectorOf<B>;
  const bool aligned =
      reinterpret_cast<std::uintptr_t>(b.data) % 16 == 0 && p.k % kWide == 0 && (p.b_row % kWide == 0 || p.n == 1);
  constexpr int kMost = sizeof(A) == 2 ? kFewNarrowRows : kFewRows;
  if (!aligned) return p.m == 1 ? queue<1, 1>(context, p) : queue<kMost, 1>(context, p);
  if (p.m == 1) return queue<1, kWide>(context, p);
  if (p.m == 2) return queue<2, kWide>(context, p);
  if (p.m <= 4) return queue<4, kWide>(context, p);
  if constexpr (kMost > 4) {
    if constexpr (sizeof(B) == 2) {
      if (a.stride[1] == 1 && ops::cuda::is_aligned(a, 8)) return queue_on_tensor_cores(context, p);
    }
    if (p.m <= 8) return queue<8, kWide>(context, p);
    queue<16, kWide>(context, p);
  }
}

}  // namespace

void multiply_few_rows(Context& context, const TensorView& a, const TensorView& b, const TensorView& c,
                       const Options& options) {
  if (context.planning()) return;
  using bf16 = __nv_bfloat16;
  const auto run = b.dtype == DType::f32   ? multiply<float, float, float>
                   : a.dtype == DType::f32 ? multiply<float, bf16, float>
                   : c.dtype == DType::f32 ? multiply<bf16, bf16, float>
                                           : multiply<bf16, bf16, bf16>;
  run(context, a, b, c, options);
}

}  // namespace flashgla::ops::matmul::cuda
