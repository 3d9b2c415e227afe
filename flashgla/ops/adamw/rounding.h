// How f32 values are kept in 16-bit words: the master beside a bf16 parameter, and bf16 moments.
#pragma once

#include <bit>
#include <cstdint>

#include "flashgla/base/random.h"

namespace flashgla::ops::adamw {

// An f32 as the nearest bf16 (halfway cases away from zero) and the 16 low bits of its own. The two rebuild it exactly:
// as integers, the f32's bits less those of the bf16 lie in [-2^15, 2^15), of which the low bits are the residue. With
// halfway cases to even an even bf16 would stand for 2^16 + 1 values of f32, which 16 bits cannot tell apart.
// A NaN becomes the plain one.
struct SplitFloat {
  std::uint16_t high;  // the bf16's bits
  std::uint16_t low;
};

constexpr SplitFloat split(float x) {
  auto bits = std::bit_cast<std::uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) bits = 0x7fc00000u;
  return {static_cast<std::uint16_t>((bits + 0x8000u) >> 16), static_cast<std::uint16_t>(bits)};
}

constexpr float join(std::uint16_t high, std::uint16_t low) {
  const auto residue = static_cast<std::uint32_t>(static_cast<std::int32_t>(static_cast<std::int16_t>(low)));
  return std::bit_cast<float>((static_cast<std::uint32_t>(high) << 16) + residue);
}

// The random bits of elements 4 group to 4 group + 3 at an update: part i is element 4 group + i's.
FLASHGLA_HOST_DEVICE inline random::Words rounding_bits(std::uint64_t seed, std::uint64_t update, std::uint64_t group) {
  return random::Stream(seed, random::Use::rounding, update).words(group);
}

// bf16 bits of one of the two neighbours of x, whose mean over random bits (the low 16 of `random`) is x. Finite values
// stay finite; NaN and infinity are kept.
constexpr std::uint16_t round_stochastically(float x, std::uint32_t random) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0u;
  const auto rounded = static_cast<std::uint16_t>((bits + (random & 0xffffu)) >> 16);
  const bool overflows = (rounded & 0x7fffu) == 0x7f80u;
  return overflows ? static_cast<std::uint16_t>(bits >> 16) : rounded;
}

}  // namespace flashgla::ops::adamw
