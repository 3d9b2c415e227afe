// The random number of a draw.
#pragma once

#include <Random123/philox.h>

#include "flashgla/ops/sampling/weights.h"

namespace flashgla::ops::sampling {

// 64 random bits, a function of the arguments alone (Philox4x32 with ten rounds; Salmon et al. 2011).
FLASHGLA_BOTH std::uint64_t draw_bits(std::uint64_t seed, std::uint64_t sequence, std::uint32_t position) {
  const r123::Philox4x32 philox;
  const r123::Philox4x32::ctr_type counter = {
      {position, 0x73616d70u, static_cast<std::uint32_t>(sequence), static_cast<std::uint32_t>(sequence >> 32)}};
  const r123::Philox4x32::key_type key = {{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)}};
  const r123::Philox4x32::ctr_type bits = philox(counter, key);
  return static_cast<std::uint64_t>(bits.v[1]) << 32 | bits.v[0];
}

}  // namespace flashgla::ops::sampling
