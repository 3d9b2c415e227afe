// Copies into shared memory that go on while their thread works. A thread copies into places of its own and reads no
// others, so that waiting for its own copies is all the order there is.
#pragma once

#include "flashgla/base/cuda/vectors.cuh"

namespace flashgla::ops::cuda {

// Begins to copy N elements to `place`, in shared memory, as aligned as they are.
template <int N, class T>
__device__ __forceinline__ void begin_copy(std::uint32_t place, const T* from) {
  using Copied = flashgla::cuda::Vector<T, N>;
  if constexpr (Copied::kBytes == 2) {
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(place), "h"(Copied::load(from).words[0]) : "memory");
  } else if constexpr (Copied::kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(place), "l"(from), "n"(Copied::kBytes) : "memory");
  }
}
template <int N, class T>
__device__ __forceinline__ void begin_copy(void* place, const T* from) {
  begin_copy<N>(ptx::shared_address(place), from);
}

// N elements, up to 16 bytes, that lie at `place`.
template <int N, class T>
__device__ __forceinline__ flashgla::cuda::Vector<T, N> copied(std::uint32_t place) {
  flashgla::cuda::Vector<T, N> result;
  auto& words = result.words;
  if constexpr (result.kBytes == 2) {
    asm volatile("ld.shared.b16 %0, [%1];" : "=h"(words[0]) : "r"(place) : "memory");
  } else if constexpr (result.kWords == 1) {
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(words[0]) : "r"(place) : "memory");
  } else if constexpr (result.kWords == 2) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(place) : "memory");
  } else {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(place)
                 : "memory");
  }
  return result;
}

template <class T>
__device__ __forceinline__ T* bytes_behind(T* from, std::int64_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(from) + bytes);
}

// What has been begun since the last call is a group, which may be empty.
__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all but the last kGroups groups are there.
template <int kGroups>
__device__ __forceinline__ void wait_for_groups_before() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

}  // namespace flashgla::ops::cuda
