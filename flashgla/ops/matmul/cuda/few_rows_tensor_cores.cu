// Products of 5 to 16 f32 rows with the transpose of a row-major bf16 matrix, on tensor cores: b's rows are the M side
// of m16n8k16, a's rows its N side. A block has 32 rows of b; its eight warps take every eighth 32 of k, and their sums
// are added in order. Both operands go from memory to registers, 16 bytes a lane and load: a lane's eight neighbours
// along k stand for the places k that the instruction gives it, the same in a and b. a is cut into three bf16 parts
// that add up to it.
#include "flashgla/base/cuda/ptx.cuh"
#include "flashgla/base/cuda/sums.cuh"
#include "flashgla/base/cuda/vectors.cuh"
#include "flashgla/ops/cuda/bf16_parts.cuh"
#include "flashgla/ops/cuda/queue_kernel.cuh"
#include "flashgla/ops/matmul/cuda/few_rows.h"

namespace flashgla::ops::matmul::cuda {

namespace {

using flashgla::cuda::kWarp;

constexpr int kWarps = 8;
constexpr int kTiles = 2;  // of 16 rows of b
constexpr int kBlockRows = 16 * kTiles;
constexpr int kStep = 32;  // of k: four lanes' eight elements, two instructions
constexpr int kParts = 3;  // bf16 numbers that an f32 is cut into
constexpr int kAhead = 2;  // steps loaded at once

// Eight neighbours of a row of a.
struct Piece {
  float values[8];

  __device__ __forceinline__ void load(const float* from) {
    const float4 first = reinterpret_cast<const float4*>(from)[0], second = reinterpret_cast<const float4*>(from)[1];
    values[0] = first.x, values[1] = first.y, values[2] = first.z, values[3] = first.w;
    values[4] = second.x, values[5] = second.y, values[6] = second.z, values[7] = second.w;
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (float& value : values) value = 0.0f;
  }
};

// kColumns: tiles of 8 rows of a.
template <int kColumns>
__global__ void __launch_bounds__(kWarps* kWarp) tensor_core_kernel(const FewRows<float, __nv_bfloat16, float> p) {
  __shared__ float shared[kWarps][8 * kColumns][kBlockRows];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, group = lane / 4, place = lane % 4;
  const std::int64_t first = std::int64_t{blockIdx.x} * kBlockRows;
  // Beyond the last row, that one: what comes of it is left out.
  const __nv_bfloat16* b_rows[2 * kTiles];
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) {
    const std::int64_t n = first + 8 * i + group;
    b_rows[i] = p.b + (n < p.n ? n : p.n - 1) * p.b_row + 8 * place;
  }
  const float* a_rows[kColumns];
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const std::int64_t m = 8 * i + group;
    a_rows[i] = p.a + (m < p.m ? m : p.m - 1) * p.a_row + 8 * place;
  }
  flashgla::cuda::wait_for_previous();
  float sums[kTiles][kColumns][4] = {};
  for (std::int64_t begin = std::int64_t{warp} * kStep; begin < p.k; begin += kAhead * kWarps * kStep) {
    uint4 b[kAhead][2 * kTiles];
    Piece a[kAhead][kColumns];
#pragma unroll
    for (int step = 0; step < kAhead; ++step) {
      const std::int64_t k = begin + step * kWarps * kStep;
      const bool inside = k + 8 * place < p.k;
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        b[step][i] = inside ? *reinterpret_cast<const uint4*>(b_rows[i] + k) : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        if (inside) {
          a[step][i].load(a_rows[i] + k);
        } else {
          a[step][i].clear();
        }
      }
    }
#pragma unroll
    for (int step = 0; step < kAhead; ++step) {
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
        std::uint32_t parts[kParts][4];
        ops::cuda::cut_in_bf16<true>(a[step][column].values, parts);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const uint4 &upper = b[step][2 * tile], &lower = b[step][2 * tile + 1];
          const std::uint32_t halves[2][4] = {{upper.x, lower.x, upper.y, lower.y},
                                              {upper.z, lower.z, upper.w, lower.w}};
#pragma unroll
          for (int part = kParts - 1; part >= 0; --part) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              ptx::mma_bf16(sums[tile][column], halves[half], parts[part][2 * half], parts[part][2 * half + 1]);
            }
          }
        }
      }
    }
  }
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        shared[warp][8 * column + 2 * place + i % 2][16 * tile + 8 * (i / 2) + group] = sums[tile][column][i];
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 8 * kColumns * kBlockRows; i += kWarps * kWarp) {
    const int m = i / kBlockRows, n = i % kBlockRows;
    if (m >= p.m || first + n >= p.n) continue;
    float total = 0.0f;
#pragma unroll
    for (int from = 0; from < kWarps; ++from) total += shared[from][m][n];
    finish(p, m, first + n, total);
  }
}

}  // namespace

void queue_on_tensor_cores(Context& context, const FewRows<float, __nv_bfloat16, float>& p) {
  ops::cuda::queue_kernel(context, "matmul: few rows", p.m <= 8 ? tensor_core_kernel<1> : tensor_core_kernel<2>,
                          (p.n + kBlockRows - 1) / kBlockRows, kWarps * kWarp, 0, p);
}

}  // namespace flashgla::ops::matmul::cuda
