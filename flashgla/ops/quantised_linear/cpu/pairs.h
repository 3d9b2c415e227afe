// Where the kernels that multiply pairs of 16-bit numbers want the codes of x.
#pragma once

#include <cstdint>
#include <cstring>

#include "flashgla/ops/quantised_linear/quantised_linear.h"

namespace flashgla::ops::quantised_linear {

// A group: of each four columns the first and third, then the second and fourth, as the bytes of the weight's lanes
// come apart.
inline void place_pairs(const std::int32_t* values, std::uint8_t* to) {
  for (std::int64_t i = 0; i < kGroup; i += 4) {
    const std::int16_t pairs[4] = {static_cast<std::int16_t>(values[i]), static_cast<std::int16_t>(values[i + 2]),
                                   static_cast<std::int16_t>(values[i + 1]), static_cast<std::int16_t>(values[i + 3])};
    std::memcpy(to + 2 * i, pairs, sizeof(pairs));
  }
}

}  // namespace flashgla::ops::quantised_linear
