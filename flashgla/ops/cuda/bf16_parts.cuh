// f32 as bf16 numbers that add up to it, for tensor cores, whose products of these are exact.
#pragma once

#include <cstdint>

namespace flashgla::ops::cuda {

// Each of eight f32 as kParts bf16, largest first, packed in twos; three add up to it. They are cut, not rounded.
// kInfinities: an infinity is its first part and zeros; else what follows the first is NaN.
template <bool kInfinities, int kParts>
__device__ __forceinline__ void cut_in_bf16(const float (&values)[8], std::uint32_t (&parts)[kParts][4]) {
  float rest[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) rest[i] = values[i];
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {  // the upper halves of two words
      parts[part][pair] = __byte_perm(__float_as_uint(rest[2 * pair]), __float_as_uint(rest[2 * pair + 1]), 0x7632);
    }
    if (part + 1 == kParts) break;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float taken = __uint_as_float(__float_as_uint(rest[i]) & 0xffff0000u);
      rest[i] = !kInfinities || isfinite(rest[i]) ? rest[i] - taken : 0.0f;
    }
  }
}

}  // namespace flashgla::ops::cuda
