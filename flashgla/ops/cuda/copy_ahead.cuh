// Copies into shared memory that go on while their thread works. A thread copies into places of its own and reads no
// others, so that waiting for its own copies is all the order there is.
#pragma once

#include "flashgla/base/cuda/vectors.cuh"

namespace flashgla::ops::cuda {

// Begins to copy N elements to `place`, as aligned as they are.
template <int N, class T>
__device__ __forceinline__ void begin_copy(void* place, const T* from) {
  using Copied = flashgla::cuda::Vector<T, N>;
  if constexpr (Copied::kBytes == 2) {
    Copied::load(from).store(static_cast<T*>(place));
  } else {
    const auto to = static_cast<std::uint32_t>(__cvta_generic_to_shared(place));
    if constexpr (Copied::kBytes == 16) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    } else {
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(Copied::kBytes) : "memory");
    }
  }
}

// What has been begun since the last call is a group, which may be empty.
__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all but the last kGroups groups are there.
template <int kGroups>
__device__ __forceinline__ void wait_for_groups_before() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

}  // namespace flashgla::ops::cuda
