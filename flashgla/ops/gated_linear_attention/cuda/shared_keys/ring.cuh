// Stages of shared memory that one part of a block fills and others empty. Use i of them all is of stage i % kStages.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/shared_keys/parts.cuh"

namespace flashgla::ops::gated_linear_attention::cuda::shared_keys {

template <class Core, int kStages>
struct Ring {
  static constexpr int stages = kStages, bytes = 2 * kStages * 8;
  std::uint32_t barriers;

  __device__ __forceinline__ std::uint32_t filled(int i) const { return barriers + i % kStages * 8; }
  __device__ __forceinline__ std::uint32_t emptied(int i) const { return filled(i) + kStages * 8; }
  __device__ __forceinline__ void wait_filled(int i) const { Core::wait_at(filled(i), i / kStages & 1); }
  __device__ __forceinline__ void wait_emptied(int i) const { Core::wait_at(emptied(i), i / kStages & 1); }
  // By one thread, how many fill and how many warps empty a stage; then __syncthreads.
  __device__ __forceinline__ void init(int filling, int emptying) const {
    for (int i = 0; i < kStages; ++i) {
      Core::init_barrier(filled(i), filling);
      Core::init_barrier(emptied(i), emptying);
    }
    Core::publish_barriers();
  }
  // Has been read, and whatever its warp was to leave there is written.
  __device__ __forceinline__ void leave(int i, int lane) const {
    __syncwarp();
    if (lane == 0) Core::arrive(emptied(i));
  }
};

}  // namespace flashgla::ops::gated_linear_attention::cuda::shared_keys
