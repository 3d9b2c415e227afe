// Random bits by counter: what they are depends on who asks, never on how much was drawn before.
// Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3": Philox4x32 with 10 rounds.
#pragma once

#include <cstdint>

namespace flashgla::ops::adamw {

struct RandomBits {
  std::uint32_t words[4];
};

// Of elements 4 group to 4 group + 3 at an update.
constexpr RandomBits random_bits(std::uint64_t seed, std::uint64_t update, std::uint64_t group) {
  std::uint32_t c0 = static_cast<std::uint32_t>(group), c1 = static_cast<std::uint32_t>(group >> 32);
  std::uint32_t c2 = static_cast<std::uint32_t>(update), c3 = static_cast<std::uint32_t>(update >> 32);
  std::uint32_t k0 = static_cast<std::uint32_t>(seed), k1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = std::uint64_t{0xd2511f53u} * c0, product1 = std::uint64_t{0xcd9e8d57u} * c2;
    c0 = static_cast<std::uint32_t>(product1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<std::uint32_t>(product1);
    c2 = static_cast<std::uint32_t>(product0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<std::uint32_t>(product0);
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace flashgla::ops::adamw
