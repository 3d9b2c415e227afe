// Products for everything that the library and the kernel for few rows leave: any strides, dtypes, alignment and sizes.
// One block a tile of 64 x 64 of c, f32 sums over k in its order.
#include "flashgla/base/cuda/vectors.cuh"
#include "flashgla/ops/cuda/queue_kernel.cuh"
#include "flashgla/ops/cuda/with_element.cuh"
#include "flashgla/ops/matmul/cuda/kernels.h"

namespace flashgla::ops::matmul::cuda {

namespace {

using flashgla::cuda::to_float;

constexpr int kTile = 64;      // rows and columns of c
constexpr int kDepth = 16;     // of k at once
constexpr int kThreads = 256;  // 16 x 16, each 4 x 4 elements, 16 apart
constexpr int kEach = 4;
constexpr int kSide = kTile / kEach;

template <class A, class B, class C, class Bias>
struct Arguments {
  const A* a;
  const B* b;
  C* c;
  const Bias* bias;  // null: none
  std::int64_t m, n, k;
  std::int64_t a_row, a_column, b_row, b_column, c_row, c_column;  // strides
  bool accumulate;
};

template <class A, class B, class C, class Bias>
__global__ void __launch_bounds__(kThreads) tiles_kernel(const Arguments<A, B, C, Bias> p) {
  flashgla::cuda::wait_for_previous();
  __shared__ float a_tile[kDepth][kTile + 1], b_tile[kDepth][kTile + 1];
  const std::int64_t tiles_across = (p.n + kTile - 1) / kTile;
  const std::int64_t row = blockIdx.x / tiles_across * kTile, column = blockIdx.x % tiles_across * kTile;
  const int x = threadIdx.x % kSide, y = threadIdx.x / kSide;
  float sums[kEach][kEach] = {};
  for (std::int64_t begin = 0; begin < p.k; begin += kDepth) {
#pragma unroll
    for (int part = 0; part < kTile * kDepth / kThreads; ++part) {
      const int i = part * kThreads + threadIdx.x;
      // Neighbouring threads along the contiguous dimension of each.
      const int a_m = p.a_column == 1 ? i / kDepth : i % kTile, a_k = p.a_column == 1 ? i % kDepth : i / kTile;
      const int b_n = p.b_column == 1 ? i % kTile : i / kDepth, b_k = p.b_column == 1 ? i / kTile : i % kDepth;
      const bool a_inside = row + a_m < p.m && begin + a_k < p.k, b_inside = column + b_n < p.n && begin + b_k < p.k;
      a_tile[a_k][a_m] = a_inside ? to_float(p.a[(row + a_m) * p.a_row + (begin + a_k) * p.a_column]) : 0.0f;
      b_tile[b_k][b_n] = b_inside ? to_float(p.b[(begin + b_k) * p.b_row + (column + b_n) * p.b_column]) : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) sums[i][j] += a_tile[k][y + i * kSide] * b_tile[k][x + j * kSide];
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const std::int64_t m = row + y + i * kSide, n = column + x + j * kSide;
      if (m >= p.m || n >= p.n) continue;
      C& out = p.c[m * p.c_row + n * p.c_column];
      float value = sums[i][j];
      if (p.accumulate) value += to_float(out);
      if (p.bias != nullptr) value += to_float(p.bias[n]);
      out = flashgla::cuda::from_float<C>(value);
    }
  }
}

}  // namespace

void multiply_by_tiles(Context& context, const TensorView& a, const TensorView& b, const TensorView& c,
                       const Options& options) {
  if (context.planning()) return;
  using ops::cuda::with_element;
  const std::int64_t tiles = (c.size(0) + kTile - 1) / kTile * ((c.size(1) + kTile - 1) / kTile);
  const auto launch = [&](auto a_zero, auto b_zero, auto c_zero, auto bias_zero) {
    using A = decltype(a_zero);
    using B = decltype(b_zero);
    using C = decltype(c_zero);
    using Bias = decltype(bias_zero);
    const Arguments<A, B, C, Bias> p{static_cast<const A*>(a.data),
                                     static_cast<const B*>(b.data),
                                     static_cast<C*>(c.data),
                                     static_cast<const Bias*>(options.bias.data),
                                     a.size(0),
                                     b.size(1),
                                     a.size(1),
                                     a.stride[0],
                                     a.stride[1],
                                     b.stride[0],
                                     b.stride[1],
                                     c.stride[0],
                                     c.stride[1],
                                     options.accumulate};
    ops::cuda::queue_kernel(context, "matmul: tiles", tiles_kernel<A, B, C, Bias>, tiles, kThreads, 0, p);
  };
  const DType bias = options.bias ? options.bias.dtype : DType::f32;
  with_element(a.dtype, [&](auto a_zero) {
    with_element(b.dtype, [&](auto b_zero) {
      with_element(c.dtype, [&](auto c_zero) {
        with_element(bias, [&](auto bias_zero) { launch(a_zero, b_zero, c_zero, bias_zero); });
      });
    });
  });
}

}  // namespace flashgla::ops::matmul::cuda
