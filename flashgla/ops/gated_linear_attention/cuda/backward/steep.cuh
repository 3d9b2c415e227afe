// What kernels that make dq, dk and dg of a chunk and 64 key channels share: sums over tokens, and, for those that do
// not go by blocks (tiles/ladder.cuh), the way of tiles that fall by more than kSteep.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/backward/gates.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/tiles/anchors.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

constexpr int kDumpRow = kTile + 8;  // floats of a row: no bank conflicts for accumulator writes and row reads

__device__ __forceinline__ void put_rows(float* dump, const Accumulator& a, int thread) {
  const int lane = thread & 31, row = (thread >> 5) * 16 + (lane >> 2);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float* at = dump + row * kDumpRow + 8 * j + 2 * (lane & 3);
    *reinterpret_cast<float2*>(at) = make_float2(a[4 * j], a[4 * j + 1]);
    *reinterpret_cast<float2*>(at + 8 * kDumpRow) = make_float2(a[4 * j + 2], a[4 * j + 3]);
  }
}

// Columns' sums over the chunk of a tile times an accumulator, by warp.
__device__ __forceinline__ void sum_beyond(ColumnParts& parts, const char* tile, const Accumulator& a, int thread) {
  *reinterpret_cast<float2*>(&parts[thread >> 5][2 * (thread & 31)]) =
      sum_over_rows(ptx::shared_address(tile), a, thread);
}

// Half of the dot product of row thread / 2 of two tiles.
__device__ __forceinline__ float dot_of_rows(const char* a, const char* b, int thread) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t at = tile_piece(thread >> 1, i + 4 * (thread & 1));
    const uint4 x = *reinterpret_cast<const uint4*>(a + at), y = *reinterpret_cast<const uint4*>(b + at);
    const std::uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float2 s = ptx::unpack_bf16(xs[e]), t = ptx::unpack_bf16(ys[e]);
      sum += s.x * t.x + s.y * t.y;
    }
  }
  return sum;
}

// a, [query][key] below the diagonal, to both of its sides: a token is a query at some levels and a key at others.
__device__ __forceinline__ void mirror_pairs(char* a, int thread) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int query = row_of_element(thread, i), key = column_of_element(thread, i);
    const auto place = [&](int r, int c) { return reinterpret_cast<std::uint16_t*>(a + element_offset(r, c)); };
    if (query > key) *place(key, query) = *place(query, key);
  }
}

// A steep tile, as a call: what dq and dk, 32 floats a thread, have from beyond the chunk gets its factors (dk's only
// when `first`), and the pairs inside come to it by halving. For a block of one group that has the chunk's gates in
// shared memory, their sums by warp and room for factors: [64][kDumpRow]. q, k: as loaded; a: [query][key], zero above
// the diagonal; x: room for a tile. dq and dk stay in memory: a call saves what registers it takes beyond those that
// are free.
template <GateTile kGate>
static __device__ __noinline__ void finish_steep(float* dq, float* dk, std::uint32_t q, std::uint32_t k, char* a,
                                                 std::uint32_t x, float* factors, const char* gates,
                                                 const ColumnParts& quarters, float scale, bool first, int thread) {
  const int warp = thread >> 5, lane = thread & 31;
  const GateColumns<kGate, 4> columns{gates, &quarters[0][0], warp, lane};
  const auto factor = [&](int i) {
    return factors[row_of_element(thread, i) * kDumpRow + column_of_element(thread, i)];
  };
  const auto put_factor = [&](int row, float2 x) {
    *reinterpret_cast<float2*>(factors + row * kDumpRow + 2 * lane) = x;
  };
  const auto power = [](float2 sum) { return make_float2(ptx::exp2(sum.x), ptx::exp2(sum.y)); };
  __syncthreads();
  walk_up(columns, kTile, warp, [&](int row, float2 sum) { put_factor(row, power(sum)); });
  mirror_pairs(a, thread);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 32; ++i) dq[i] *= factor(i);
  __syncthreads();
  walk_down(columns, kTile, warp, [&](int row, float2 sum) { put_factor(row, power(sum)); });
  __syncthreads();
  if (first) {
#pragma unroll
    for (int i = 0; i < 32; ++i) dk[i] *= factor(i);
  }
  Accumulator d;
  const auto multiply = [&](std::uint32_t tile, auto keeps) {
    const int own = fresh_thread();
    std::uint32_t operand[16];
    load_operand<Stored::k_inner>(operand, ptx::shared_address(a), own);
    clear(d);
    __syncwarp();  // or what is loaded before and after would lie in registers beside the product's operands
    add_masked_product(d, operand, tile, own, keeps);
    __syncwarp();
  };
  const auto itself = [](int row, int column) { return row == column; };
  multiply(k, itself);
#pragma unroll
  for (int i = 0; i < 32; ++i) dq[i] += d[i];
  multiply(q, itself);
#pragma unroll
  for (int i = 0; i < 32; ++i) dk[i] += scale * d[i];
#pragma unroll 1
  for (int size = kTile / 2; size > 0; size /= 2) {
    __syncthreads();
    put_level(x, q, k, columns, size, warp, lane, put_factor);
    __syncthreads();
    multiply(x, [size](int row, int column) { return ((row ^ column) & -size) == size; });
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const float sum = factor(i) * d[i];
      const bool query = (row_of_element(thread, i) & size) != 0;
      dq[i] += query ? sum : 0.0f;
      dk[i] += query ? 0.0f : scale * sum;
    }
  }
  __syncthreads();
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
