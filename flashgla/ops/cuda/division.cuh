// Division of 31-bit numbers by one that is known before the launch: two instructions instead of twenty.
#pragma once

#include <bit>
#include <cstdint>

namespace flashgla::ops::cuda {

struct Division {
  std::uint32_t by, multiplier;
  int shift;

  // Granlund and Montgomery 1994: multiplier = floor(2^32 (2^shift - by) / by) + 1, 2^shift the power of two at or
  // above `by`.
  explicit Division(std::uint32_t divisor)
      : by(divisor),
        multiplier(static_cast<std::uint32_t>(
            (((std::uint64_t{1} << std::bit_width(divisor - 1)) - divisor) << 32) / divisor + 1)),
        shift(std::bit_width(divisor - 1)) {}

  // n < 2^31, so that the sum has no carry.
  __device__ __forceinline__ std::uint32_t of(std::uint32_t n) const { return (__umulhi(n, multiplier) + n) >> shift; }
};

}  // namespace flashgla::ops::cuda
