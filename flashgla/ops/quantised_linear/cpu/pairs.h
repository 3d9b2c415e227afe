// Where the kernels that multiply pairs of 16-bit numbers want the codes of x.
#pragma once

#include <cstdint>
#include <cstring>

namespace flashgla::ops::quantised_linear {

// Four columns: the first and third, then the second and fourth, as the bytes of the weight's lanes come apart.
inline void place_pairs(const std::int32_t* values, std::uint8_t* to) {
  const std::int16_t pairs[4] = {static_cast<std::int16_t>(values[0]), static_cast<std::int16_t>(values[2]),
                                 static_cast<std::int16_t>(values[1]), static_cast<std::int16_t>(values[3])};
  std::memcpy(to, pairs, sizeof(pairs));
}

}  // namespace flashgla::ops::quantised_linear
