#include "flashgla/base/float16.h"

#include <cmath>

namespace flashgla {

Float16::Float16(float value) {
  const auto word = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((word >> 16) & 0x8000u);
  const std::uint32_t magnitude = word & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {  // NaN
    bits = sign | 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {  // rounds past the largest finite value
    bits = sign | 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // subnormal: units of 2^-24, rounded to even by the addition
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    bits = sign | static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u);
  } else {
    const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    bits = sign | static_cast<std::uint16_t>((rounded - 0x38000000u) >> 13);
  }
}

Float16::operator float() const {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t exponent = (bits >> 10) & 0x1fu;
  const std::uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0) {
    const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);
    return sign ? -magnitude : magnitude;
  }
  const std::uint32_t word =
      exponent == 0x1fu ? 0x7f800000u | (mantissa << 13) : ((exponent + 112u) << 23) | (mantissa << 13);
  return std::bit_cast<float>(sign | word);
}

}  // namespace flashgla
