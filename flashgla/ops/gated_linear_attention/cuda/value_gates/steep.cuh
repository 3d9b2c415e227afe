// Gates over values: gates by columns, and the way of tiles that fall by more than kSteep, by halving.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/backward/gates.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/tiles/halving.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// A group of 128 threads walks a chunk by columns: warp w takes tokens 16w..16w+15, lane l of it channels 2l and 2l+1.

// Base-2 log gates of a token, two channels, from 64 rows of f32.
__device__ __forceinline__ float2 gate_at(const char* gates, int row, int lane) {
  const float2 g = *reinterpret_cast<const float2*>(gates + row * 256 + lane * 8);
  return make_float2(ptx::larger_or_nan(g.x * kLog2E, kStrongest), ptx::larger_or_nan(g.y * kLog2E, kStrongest));
}

// The gates of a chunk for halving, as they lie in shared memory; totals: [kWarpsIn][64], sums over the warps' rows.
template <int kWarpsIn>
struct GateColumns {
  static constexpr int kWarps = kWarpsIn, kRows = kTile / kWarps;
  const char* gates;
  const float* totals;
  int warp, lane;
  __device__ __forceinline__ float2 gate(int i) const { return gate_at(gates, kRows * warp + i, lane); }
  __device__ __forceinline__ float2 total(int w) const {
    return *reinterpret_cast<const float2*>(totals + w * kTile + 2 * lane);
  }
};

// Sums of the four quarters of the chunk. Barrier before use.
__device__ __forceinline__ void sum_quarters(ColumnParts& parts, const char* gates, int thread) {
  const int warp = thread >> 5, lane = thread & 31;
  float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float2 g = gate_at(gates, 16 * warp + i, lane);
    sum.x += g.x;
    sum.y += g.y;
  }
  *reinterpret_cast<float2*>(&parts[warp][2 * lane]) = sum;
}
// b before the warp's first token; with warp 4, of the whole chunk.
__device__ __forceinline__ float2 sum_before(const ColumnParts& parts, int warp, int lane) {
  float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const float2 part = *reinterpret_cast<const float2*>(&parts[w][2 * lane]);
    if (w < warp) {
      sum.x += part.x;
      sum.y += part.y;
    }
  }
  return sum;
}

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
static __device__ __noinline__ void finish_steep(float* dq, float* dk, std::uint32_t q, std::uint32_t k, char* a,
                                                 std::uint32_t x, float* factors, const char* gates,
                                                 const ColumnParts& quarters, float scale, bool first, int thread) {
  const int warp = thread >> 5, lane = thread & 31;
  const GateColumns<4> columns{gates, &quarters[0][0], warp, lane};
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
