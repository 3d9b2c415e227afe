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
  static constexpr int kBatch = 16;        // tokens that a thread reads at once

  const std::int32_t* tokens;
  std::int64_t count, words;
  int block_bits;           // there are 1 << block_bits blocks
  std::uint32_t* keys;      // tokens by place; of bad ones `words`
  std::int32_t* positions;  // where they come from
  std::int32_t* bad;        // first_bad.cuh
  std::int32_t* zeroed;     // `zeros` numbers that become 0, for the next kernel
  std::int64_t zeros;

  static int block_bits_of(std::int64_t words) {
    return std::max(7, static_cast<int>(std::bit_width(static_cast<std::uint64_t>(words / kTokensEach))));
  }

  __device__ bool is_of(std::uint32_t key, std::uint32_t block) const {
    return key != kNone && (key & ((1u << block_bits) - 1)) == block;
  }

  // A warp has `each` positions, and reads kRead of them at a time, a thread every 32nd.
  static constexpr int kRead = kBatch * flashgla::cuda::kWarp;
  __device__ __forceinline__ int each() const {
    constexpr int kRow = flashgla::cuda::kWarp;
    return static_cast<int>((count + kWarps * kRow - 1) / (kWarps * kRow)) * kRow;
  }
  // Keys of those from `first` on, kNone behind the warp's end.
  __device__ __forceinline__ void read(int warp, int first, std::uint32_t (&key)[kBatch]) const {
    const int end = static_cast<int>(std::min<std::int64_t>(std::int64_t{warp + 1} * each(), count));
    const int lane = threadIdx.x % flashgla::cuda::kWarp;
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int i = first + k * flashgla::cuda::kWarp + lane;
      key[k] = i < end ? static_cast<std::uint32_t>(tokens[i]) : kNone;
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {  // one below 0 is a large number
      const int i = first + k * flashgla::cuda::kWarp + lane;
      if (i < end && key[k] >= static_cast<std::uint64_t>(words)) key[k] = static_cast<std::uint32_t>(words);
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
  constexpr int kCounts = ByToken::kTokensEach * ByToken::kWarps, kEach = kCounts / ByToken::kThreads;
  __shared__ __align__(16) int counts[kCounts];  // by token, then by warp
  __shared__ int shared[kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (int i = threadIdx.x; i < kCounts; i += ByToken::kThreads) counts[i] = 0;
  __syncthreads();
  flashgla::cuda::wait_for_previous();
  for (std::int64_t i = std::int64_t{blockIdx.x} * ByToken::kThreads + threadIdx.x; i < p.zeros;
       i += std::int64_t{gridDim.x} * ByToken::kThreads) {
    p.zeroed[i] = 0;
  }
  const std::uint32_t mask = (1u << p.block_bits) - 1;
  const int begin = warp * p.each(), end = begin + p.each();
  std::uint32_t key[ByToken::kBatch];
  int below = 0;
  for (int first = begin; first < end; first += ByToken::kRead) {
    p.read(warp, first, key);
#pragma unroll
    for (int k = 0; k < ByToken::kBatch; ++k) {
      below += key[k] != kNone && (key[k] & mask) < blockIdx.x ? 1 : 0;
      if (blockIdx.x == 0 && key[k] == p.words) flashgla::ops::cuda::note_bad(p.bad, first + k * kWarp + lane);
      if (p.is_of(key[k], blockIdx.x)) atomicAdd(&counts[(key[k] >> p.block_bits) * ByToken::kWarps + warp], 1);
    }
  }
  below = flashgla::cuda::block_sum(below, shared);
  __syncthreads();
  begin_of_each<kEach>(counts, below, shared);
  flashgla::cuda::release_next();
  for (int first = begin; first < end; first += ByToken::kRead) {
    if (p.each() > ByToken::kRead) p.read(warp, first, key);  // else they are still there
    std::uint32_t all = 0;
#pragma unroll
    for (int k = 0; k < ByToken::kBatch; ++k) all |= p.is_of(key[k], blockIdx.x) ? 1u << k : 0u;
    all = __reduce_or_sync(0xffffffffu, all);
#pragma unroll
    for (int k = 0; k < ByToken::kBatch; ++k) {
      if ((all >> k & 1) == 0) continue;  // none of the warp's
      const bool mine = p.is_of(key[k], blockIdx.x);
      const std::uint32_t lanes = __ballot_sync(0xffffffffu, mine);
      if (mine) {
        const std::uint32_t same = __match_any_sync(lanes, key[k]);
        int* next = &counts[(key[k] >> p.block_bits) * ByToken::kWarps + warp];
        const int to = *next, rank = __popc(same & ((1u << lane) - 1));
        __syncwarp(lanes);
        if (rank == 0) *next = to + __popc(same);
        p.keys[to + rank] = key[k];
        p.positions[to + rank] = first + k * kWarp + lane;
      }
      __syncwarp();
    }
  }
}

}  // namespace flashgla::ops::embedding::cuda
