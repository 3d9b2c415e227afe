// Positions by token, in one kernel: what a stable sort of tokens gives, but that the tokens come in the order of
// (token % blocks, token / blocks). Block b writes those with token % blocks = b. It reads all tokens twice: to count
// how many of each its warps have, and how many tokens earlier blocks have; then to write each to its place. No block
// waits for another, and a warp has a run of positions, so that those of one token keep their order.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/base/cuda/sums.cuh"
#include "flashgla/ops/cuda/first_bad.cuh"

namespace flashgla::ops::embedding::cuda {

constexpr std::uint32_t kNone = 0xffffffff;  // no token's key

struct ByToken {
  static constexpr int kThreads = 1024, kWarps = kThreads / flashgla::cuda::kWarp;
  static constexpr int kTokensEach = 256;  // of a block at most
  static constexpr int kBatch = 8;         // tokens that a thread reads at once

  const std::int32_t* tokens;
  std::int64_t count, words;
  int block_bits;           // there are 1 << block_bits blocks
  std::uint32_t* keys;      // tokens by place; of bad ones `words`
  std::int32_t* positions;  // where they come from
  std::int32_t* bad;        // first_bad.cuh

  static int block_bits_of(std::int64_t words) {
    return std::max(7, static_cast<int>(std::bit_width(static_cast<std::uint64_t>(words / kTokensEach))));
  }

  __device__ bool is_of(std::uint32_t key, std::uint32_t block) const {
    return key != kNone && (key & ((1u << block_bits) - 1)) == block;
  }

  // work(i, key) for a warp's positions in their order, a thread each; kNone behind their end.
  template <class Work>
  __device__ __forceinline__ void for_each(int warp, int lane, const Work& work) const {
    constexpr int kRow = flashgla::cuda::kWarp;
    const std::int64_t each = (count + kWarps * kRow - 1) / (kWarps * kRow) * kRow;
    const std::int64_t begin = warp * each, end = begin + each < count ? begin + each : count;
    for (std::int64_t first = begin; first < end; first += kBatch * kRow) {
      std::uint32_t key[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const std::int64_t i = first + k * kRow + lane;
        key[k] = kNone;
        if (i >= end) continue;
        const std::int64_t token = tokens[i];
        key[k] = static_cast<std::uint32_t>(token >= 0 && token < words ? token : words);
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) work(first + k * kRow + lane, key[k]);
    }
  }
};

// counts[i] of a block become the sums of those before it, plus `before`. shared: a number for each warp.
template <int kEach>
__device__ __forceinline__ void begin_of_each(int* counts, int before, int* shared) {
  using flashgla::cuda::kWarp;
  static_assert(kEach % 4 == 0);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  auto* own = reinterpret_cast<int4*>(counts + threadIdx.x * kEach);
  int4 held[kEach / 4];
  int total = 0;
#pragma unroll
  for (int i = 0; i < kEach / 4; ++i) {
    held[i] = own[i];
    total += held[i].x + held[i].y + held[i].z + held[i].w;
  }
  const auto sum_to_here = [&](int x) {
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, x, distance);
      if (lane >= distance) x += other;
    }
    return x;
  };
  const int in_warp = sum_to_here(total);
  if (lane == kWarp - 1) shared[warp] = in_warp;
  __syncthreads();
  if (warp == 0) {
    const int of_warp = lane < blockDim.x / kWarp ? shared[lane] : 0;
    shared[lane] = sum_to_here(of_warp) - of_warp;
  }
  __syncthreads();
  int next = before + shared[warp] + in_warp - total;
#pragma unroll
  for (int i = 0; i < kEach / 4; ++i) {
    const int4 count = held[i];
    held[i] = make_int4(next, next + count.x, next + count.x + count.y, next + count.x + count.y + count.z);
    next = held[i].w + count.w;
    own[i] = held[i];
  }
  __syncthreads();
}

static __global__ void __launch_bounds__(ByToken::kThreads) by_token_kernel(const ByToken p) {
  using flashgla::cuda::kWarp;
  flashgla::cuda::wait_for_previous();
  constexpr int kCounts = ByToken::kTokensEach * ByToken::kWarps, kEach = kCounts / ByToken::kThreads;
  __shared__ __align__(16) int counts[kCounts];  // by token, then by warp
  __shared__ int shared[kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (int i = threadIdx.x; i < kCounts; i += ByToken::kThreads) counts[i] = 0;
  __syncthreads();
  const std::uint32_t mask = (1u << p.block_bits) - 1;
  int below = 0;
  p.for_each(warp, lane, [&](std::int64_t i, std::uint32_t key) {
    below += key != kNone && (key & mask) < blockIdx.x ? 1 : 0;
    if (blockIdx.x == 0 && key == p.words) flashgla::ops::cuda::note_bad(p.bad, i);
    if (p.is_of(key, blockIdx.x)) atomicAdd(&counts[(key >> p.block_bits) * ByToken::kWarps + warp], 1);
  });
  below = flashgla::cuda::block_sum(below, shared);
  __syncthreads();
  begin_of_each<kEach>(counts, below, shared);
  flashgla::cuda::release_next();
  p.for_each(warp, lane, [&](std::int64_t i, std::uint32_t key) {
    const bool mine = p.is_of(key, blockIdx.x);
    const std::uint32_t lanes = __ballot_sync(0xffffffffu, mine);
    if (mine) {
      const std::uint32_t same = __match_any_sync(lanes, key);
      int* next = &counts[(key >> p.block_bits) * ByToken::kWarps + warp];
      const int begin = *next, rank = __popc(same & ((1u << lane) - 1));
      __syncwarp(lanes);
      if (rank == 0) *next = begin + __popc(same);
      p.keys[begin + rank] = key;
      p.positions[begin + rank] = static_cast<std::int32_t>(i);
    }
    __syncwarp();
  });
}

}  // namespace flashgla::ops::embedding::cuda
