// What is left to add up behind the backward. Where that tells how far it has come, this kernel begins while it still
// runs, and in what it leaves free of a multiprocessor adds up db and dc as they come.
#pragma once

#include <limits>

#include "flashgla/ops/selective_scan/cuda/backward_lines.cuh"

namespace flashgla::ops::selective_scan::cuda {

// How far a warp of the backward has come: the number of a chunk whose db and dc it has stored, and those of all behind
// it, where they are its turn. Told now and then, since that waits for stores to arrive.
struct Progress {
  // It lies in front of the sums; blocks are in the order of `Where`.
  static __device__ __forceinline__ int* of(float* sums, unsigned warp) {
    return reinterpret_cast<int*>(sums) - (gridDim.x - blockIdx.x) * kWarps + warp;
  }

  static __device__ __forceinline__ void put(int* to, int chunk) {
    asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(chunk) : "memory");
  }
  static __device__ __forceinline__ int get(const int* from) {
    int chunk;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(chunk) : "l"(from) : "memory");
    return chunk;
  }
  static __device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

  // By one thread of a block: nothing yet. Then the kernel that reads it may begin.
  static __device__ __forceinline__ void begin(float* sums) {
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) put(of(sums, warp), std::numeric_limits<int>::max());
    fence();
    flashgla::cuda::release_next();
  }
  // By one lane, behind the warp's stores.
  static __device__ __forceinline__ void tell(int* to, int chunk) {
    fence();
    put(to, chunk);
  }
};

template <class T>
struct BackwardSums {
  const float* partial;  // of Gradients, as the next two
  const float *da_log, *dskip;
  std::int64_t tiles, rows, length, pieces;  // length: of a line; pieces: of sequences
  int segments, channels, states;
  Lines<T> db, dc;
  float *da_log_sum, *dskip_sum;  // [E,K], [E]: added to what is there

  static constexpr int kTokens = 2 * kChunk;  // of a block beside the backward: a thread has four sums of one of them

  __host__ __device__ std::int64_t keys() const { return rows * 2 * kStates; }
  __host__ __device__ std::int64_t rates() const { return std::int64_t{channels} * states; }
  std::int64_t threads() const { return keys() + rates() + channels; }

  __host__ __device__ std::int64_t lines() const { return length == 0 ? 0 : rows / length; }
  __host__ __device__ std::int64_t groups() const { return (length + kTokens - 1) / kTokens; }
  __host__ __device__ std::int64_t key_blocks() const { return lines() * groups(); }
  std::int64_t blocks_beside() const { return key_blocks() + (rates() + channels + kThreads - 1) / kThreads; }
};

// da_log and dskip of all pieces: item by item, those of dskip behind.
template <class T>
__device__ __forceinline__ void add_up_pieces(const BackwardSums<T>& sums, std::int64_t item) {
  float total = 0.0f;
  if (item < sums.rates()) {
    for (std::int64_t i = 0; i < sums.pieces; ++i) total += sums.da_log[i * sums.rates() + item];
    sums.da_log_sum[item] += total;
  } else if (item < sums.rates() + sums.channels) {
    const std::int64_t channel = item - sums.rates();
    for (std::int64_t i = 0; i < sums.pieces; ++i) total += sums.dskip[i * sums.channels + channel];
    sums.dskip_sum[channel] += total;
  }
}

// db and dc of a token and state: the blocks' sums, one after the other.
template <class T>
__global__ void __launch_bounds__(kThreads) sum_kernel(BackwardSums<T> sums) {
  flashgla::cuda::wait_for_previous();
  const std::int64_t thread = std::int64_t{blockIdx.x} * kThreads + threadIdx.x, item = thread - sums.keys();
  if (item >= 0) {
    add_up_pieces(sums, item);
    return;
  }
  const std::int64_t row = thread / (2 * kStates);
  const int which = static_cast<int>(thread / kStates % 2), state = state_at<T>(static_cast<int>(thread % kStates));
  if (state >= sums.states) return;
  float total = 0.0f;
#pragma unroll 8
  for (std::int64_t tile = 0; tile < sums.tiles; ++tile) total += sums.partial[tile * sums.keys() + thread];
  const Lines<T>& to = which == 0 ? sums.db : sums.dc;
  *to.at(row / sums.length, row % sums.length, state) = flashgla::cuda::from_float<T>(total);
}

// Waits until the backward has left the sums of this line's chunks `first` and the next one.
template <class T>
__device__ __forceinline__ void wait_for_chunks(const BackwardSums<T>& sums, unsigned line, int first) {
  const int chunks = static_cast<int>((sums.length + kChunk - 1) / kChunk);
  const int each = (chunks + sums.segments - 1) / sums.segments;  // of `Chunks`
  const int warp = static_cast<int>(threadIdx.x) % kWarps, chunk = min(first + warp / 2, chunks - 1);
  const std::int64_t behind = sums.pieces - line * sums.segments - chunk / each;
  const int* const from = reinterpret_cast<const int*>(sums.partial) - behind * sums.tiles * kWarps;
  for (bool there = false; __syncthreads_or(!there);) {
    there = true;
    // The warp that has stored this chunk's: those behind the last chunk have stored none.
    for (unsigned i = threadIdx.x; i < sums.tiles * kWarps && first + warp / 2 < chunks; i += kThreads) {
      there = there && Progress::get(from + i) <= chunk;
    }
    if (!there) __nanosleep(500);
  }
}

// The same beside a backward that tells how far it has come, in the order in which it leaves the sums. Not of packed
// sequences: there it is not known which rows are a chunk's.
template <class T>
__global__ void __launch_bounds__(kThreads) sum_beside_kernel(BackwardSums<T> sums) {
  const std::int64_t others = blockIdx.x - sums.key_blocks();
  if (others < 0) {
    const auto lines = static_cast<unsigned>(sums.lines());
    const unsigned line = blockIdx.x % lines;
    const int group = static_cast<int>(sums.groups()) - 1 - static_cast<int>(blockIdx.x / lines);
    const int t = group * sums.kTokens + static_cast<int>(threadIdx.x) / (2 * kStates / 4);
    const int place = static_cast<int>(threadIdx.x) * 4 % (2 * kStates);
    wait_for_chunks(sums, line, group * (sums.kTokens / kChunk));
    if (t < sums.length) {
      const float* const from = sums.partial + (line * sums.length + t) * (2 * kStates) + place;
      float total[4] = {};
#pragma unroll 16
      for (std::int64_t tile = 0; tile < sums.tiles; ++tile) {
        const float4 four = __ldcg(reinterpret_cast<const float4*>(from + tile * sums.keys()));
        total[0] += four.x;
        total[1] += four.y;
        total[2] += four.z;
        total[3] += four.w;
      }
      const Lines<T>& to = place < kStates ? sums.db : sums.dc;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int state = state_at<T>(place % kStates + i);
        if (state < sums.states) *to.at(line, t, state) = flashgla::cuda::from_float<T>(total[i]);
      }
    }
  }
  // Blocks of db and dc wait, too, so that what comes behind this kernel comes behind the backward.
  flashgla::cuda::wait_for_previous();
  if (others >= 0) add_up_pieces(sums, others * kThreads + threadIdx.x);
}

}  // namespace flashgla::ops::selective_scan::cuda
