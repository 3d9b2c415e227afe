// Packed weights as kernels read them; quantised_linear.h says how they lie.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "flashgla/base/cuda/ptx_bytes.cuh"
#include "flashgla/ops/quantised_linear/quantised_linear.h"

namespace flashgla::ops::quantised_linear::cuda {

// Four of kValuesOfQ4 as bytes.
constexpr std::uint32_t four_values(int first) {
  std::uint32_t word = 0;
  for (int i = 3; i >= 0; --i) word = word << 8 | static_cast<std::uint8_t>(kValuesOfQ4[first + i]);
  return word;
}

// Signed bytes: four columns' values each.
struct Halves {
  std::uint32_t low, high;
};
// Of a word of q4: of the columns in the low halves of its bytes, and in the high ones.
__device__ __forceinline__ Halves values_of_q4(std::uint32_t codes) {
  constexpr std::uint32_t k0 = four_values(0), k4 = four_values(4), k8 = four_values(8), k12 = four_values(12);
  // Codes below 8 and the others from a table each, and of each pair the right one.
  const std::uint32_t within = codes & 0x77777777u, which = 0x32103210u | (codes & 0x88888888u) >> 1;
  const auto pick = [&](int shift) {
    const std::uint32_t place = within >> shift;
    return __byte_perm(__byte_perm(k0, k4, place), __byte_perm(k8, k12, place), which >> shift);
  };
  const std::uint32_t front = pick(0), back = pick(16);  // low and high halves in turns
  return {__byte_perm(front, back, 0x6420), __byte_perm(front, back, 0x7531)};
}

// Signed bytes that add up to values: of a word's first four halves of bytes (low and high ones in turns), and its
// last.
struct Terms {
  std::uint32_t front[2], back[2];
};
// A selector of a byte whose highest bit is set gives that byte's sign, here -1 of the values of codes below 8, which
// are negative, and 0 of the others, to which 1 is added for that.
__device__ __forceinline__ Terms terms_of_q4(std::uint32_t codes) {
  constexpr std::uint32_t k0 = four_values(0), k4 = four_values(4);
  constexpr std::uint32_t k8 = four_values(8) + 0x01010101u, k12 = four_values(12) + 0x01010101u;
  static_assert((k0 & k4 & 0x80808080u) == 0x80808080u && ((k8 | k12) & 0x80808080u) == 0);
  const std::uint32_t others = codes ^ 0x88888888u;
  return {{ptx::select_bytes(k0, k4, codes), ptx::select_bytes(k8, k12, others)},
          {ptx::select_bytes(k0, k4, codes >> 16), ptx::select_bytes(k8, k12, others >> 16)}};
}

// Of a word of q8.
__device__ __forceinline__ std::uint32_t values_of_q8(std::uint32_t codes) { return codes ^ 0x80808080u; }

// Byte i of signed ones.
__device__ __forceinline__ int byte_of(std::uint32_t word, int i) {
  return static_cast<std::int8_t>(word >> 8 * i & 0xffu);
}

// The scale of a row of a block.
__device__ __forceinline__ float scale_of(const unsigned char* block, int row) {
  return __half2float(reinterpret_cast<const __half*>(block)[row]);
}

}  // namespace flashgla::ops::quantised_linear::cuda
