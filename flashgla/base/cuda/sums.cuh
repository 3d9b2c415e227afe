// Sums over threads in a fixed order, which every thread of the sum gets: the same bits whenever they are run.
#pragma once

#include <cuda_runtime.h>

namespace flashgla::cuda {

constexpr int kWarp = 32;

template <class T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

// Over all threads of a block of whole warps along x. `shared`: 32 elements, which no thread may touch between its last
// barrier and this call.
template <class T>
__device__ __forceinline__ T block_sum(T x, T* shared) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  x = warp_sum(x);
  if (warps == 1) return x;
  if (lane == 0) shared[warp] = x;
  __syncthreads();
  return warp_sum(lane < warps ? shared[lane] : T(0));
}

// A block cut into teams of `threads`, 32 or a multiple of it, each of which works on something of its own.
class Team {
 public:
  // `shared`: as many elements as the block has warps, twice.
  __device__ Team(int threads, float* shared)
      : threads_(threads),
        index_(threadIdx.x / threads),
        rank_(threadIdx.x % threads),
        sums_(shared + index_ * 2 * (threads / kWarp)) {}

  __device__ int threads() const { return threads_; }
  __device__ int index() const { return index_; }  // of the team in its block
  __device__ int rank() const { return rank_; }    // of the thread in its team

  // Over the team's threads, which all must come here.
  __device__ __forceinline__ float sum(float x) {
    x = warp_sum(x);
    const int warps = threads_ / kWarp;
    if (warps == 1) return x;
    float* sums = sums_ + turn_ * warps;  // in turns: who is late reads the last sum while the next is written
    turn_ ^= 1;
    const int lane = threadIdx.x % kWarp;
    if (lane == 0) sums[rank_ / kWarp] = x;
    asm volatile("bar.sync %0, %1;" ::"r"(index_ + 1), "r"(threads_) : "memory");
    return warp_sum(lane < warps ? sums[lane] : 0.0f);
  }

 private:
  int threads_, index_, rank_, turn_ = 0;
  float* sums_;
};

}  // namespace flashgla::cuda
