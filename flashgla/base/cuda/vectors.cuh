// Loads and stores of several neighbouring elements at once, up to 16 bytes an instruction, and their values as f32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "flashgla/base/cuda/ptx.cuh"
#include "flashgla/base/float16.h"

namespace flashgla::cuda {

// The type that kernels use for a storage type of the host.
template <class T>
struct DeviceElementOf {
  using type = T;
};
template <>
struct DeviceElementOf<BFloat16> {
  using type = __nv_bfloat16;
};
template <class T>
using DeviceElement = typename DeviceElementOf<T>::type;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <class T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else {
    return __float2bfloat16_rn(x);
  }
}

// N elements of T (f32 or bf16; N a power of two), as they lie in memory.
template <class T, int N>
struct Vector {
  static constexpr int kBytes = N * static_cast<int>(sizeof(T));
  using Word = std::conditional_t<kBytes == 2, std::uint16_t, std::uint32_t>;
  static constexpr int kWords = kBytes / static_cast<int>(sizeof(Word));
  Word words[kWords];

  // `from` and `to` are multiples of min(kBytes, 16).
  static __device__ __forceinline__ Vector load(const T* from) {
    Vector result;
    if constexpr (kBytes >= 16) {
#pragma unroll
      for (int i = 0; i < kBytes / 16; ++i) {
        const uint4 four = reinterpret_cast<const uint4*>(from)[i];
        result.words[4 * i] = four.x;
        result.words[4 * i + 1] = four.y;
        result.words[4 * i + 2] = four.z;
        result.words[4 * i + 3] = four.w;
      }
    } else if constexpr (kBytes == 8) {
      const uint2 two = *reinterpret_cast<const uint2*>(from);
      result.words[0] = two.x;
      result.words[1] = two.y;
    } else {
      result.words[0] = *reinterpret_cast<const Word*>(from);
    }
    return result;
  }

  // To device memory. One instruction for 8 or 16 bytes: written as an assignment, nvcc 13 cut most of them into words,
  // which made kernels that write 16-bit elements up to a third slower.
  __device__ __forceinline__ void store(T* to) const {
    if constexpr (kBytes >= 16) {
      const std::size_t address = __cvta_generic_to_global(to);
#pragma unroll
      for (int i = 0; i < kBytes / 16; ++i) {
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address + 16 * i), "r"(words[4 * i]),
                     "r"(words[4 * i + 1]), "r"(words[4 * i + 2]), "r"(words[4 * i + 3])
                     : "memory");
      }
    } else if constexpr (kBytes == 8) {
      asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "r"(words[0]), "r"(words[1])
                   : "memory");
    } else {
      *reinterpret_cast<Word*>(to) = words[0];
    }
  }

  static __device__ __forceinline__ Vector zero() {
    Vector result;
#pragma unroll
    for (int i = 0; i < kWords; ++i) result.words[i] = 0;
    return result;
  }

  __device__ __forceinline__ float operator[](int i) const {  // i known at compile time, once unrolled
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(words[i]);
    } else if constexpr (kBytes == 2) {
      return __uint_as_float(static_cast<std::uint32_t>(words[0]) << 16);
    } else {
      return __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
    }
  }

  // Rounded to nearest even.
  static __device__ __forceinline__ Vector of(const float (&values)[N]) {
    Vector result;
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < N; ++i) result.words[i] = __float_as_uint(values[i]);
    } else if constexpr (kBytes == 2) {
      result.words[0] = __bfloat16_as_ushort(__float2bfloat16_rn(values[0]));
    } else {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        result.words[i] = ptx::pack_bf16(values[2 * i], values[2 * i + 1]);  // of halves, nvcc 13 put it together again
      }
    }
    return result;
  }
};

// Elements in 16 bytes.
template <class T>
constexpr int kVectorOf = 16 / static_cast<int>(sizeof(T));

}  // namespace flashgla::cuda
