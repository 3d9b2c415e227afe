// Which elements fall out, the same on every device.
#pragma once

#include <cmath>
#include <cstdint>

#include "flashgla/base/random.h"
#include "flashgla/ops/arguments.h"
#include "flashgla/ops/dropout/dropout.h"

namespace flashgla::ops::dropout {

// 16 bits an element, 8 elements a draw.
constexpr int kElementsPerDraw = 8;

// The 16 bits of element kElementsPerDraw i + j, from draw i.
FLASHGLA_HOST_DEVICE inline std::uint32_t bits_of(const random::Words& words, int j) {
  return static_cast<std::uint32_t>((j < 4 ? words.first : words.second) >> 16 * (j % 4)) & 0xffffu;
}

// For operators that have a Mask among their arguments: throws Error naming what of it is wrong.
void check(const Arguments& arguments, const Mask& mask);

// A Mask as kernels read it.
struct Rule {
  std::uint64_t seed;
  std::uint64_t place;
  const double* step;
  const std::int32_t* micro_batch;
  std::uint32_t threshold;  // elements with fewer bits fall out

  explicit Rule(const Mask& mask)
      : seed(mask.seed),
        place(static_cast<std::uint64_t>(mask.place)),
        step(mask.step.as<double>()),
        micro_batch(mask.micro_batch.as<std::int32_t>()),
        threshold(static_cast<std::uint32_t>(std::lround(mask.probability * 0x1p16))) {
    if (threshold > 0xffffu) threshold = 0xffffu;
  }

  // Of the elements that stay.
  FLASHGLA_HOST_DEVICE double factor() const { return 0x1p16 / (0x1p16 - threshold); }

  // The factor of an element.
  FLASHGLA_HOST_DEVICE double factor_of(const random::Words& words, int j) const {
    return bits_of(words, j) >= threshold ? factor() : 0.0;
  }

  // Reads the device's memory.
  FLASHGLA_HOST_DEVICE random::Stream stream() const {
    return {seed, random::Use::dropout,
            static_cast<std::uint64_t>(*step) << 32 | static_cast<std::uint64_t>(*micro_batch) << 16 | place};
  }
};

}  // namespace flashgla::ops::dropout
