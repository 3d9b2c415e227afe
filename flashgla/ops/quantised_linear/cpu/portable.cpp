// Plain C++: what every processor runs.
#include <algorithm>
#include <bit>
#include <cstring>

#include "flashgla/base/float16.h"
#include "flashgla/ops/quantised_linear/cpu/kernel.h"
#include "flashgla/ops/quantised_linear/cpu/pairs.h"

namespace flashgla::ops::quantised_linear {

namespace {

struct Isa {
  static constexpr int kLanes = 16;
  struct Bytes {
    std::uint8_t of[4 * kLanes];
  };
  struct Floats {
    float of[kLanes];
  };
  struct Sum {
    std::int32_t of[kLanes];
  };

  static Bytes load(const std::uint8_t* from) {
    Bytes bytes;
    std::memcpy(bytes.of, from, sizeof(bytes.of));
    return bytes;
  }
  static Floats load_f16(const std::uint8_t* from) {
    Floats floats;
    for (int r = 0; r < kLanes; ++r) {
      Float16 value;
      std::memcpy(&value.bits, from + 2 * r, sizeof(value.bits));
      floats.of[r] = static_cast<float>(value);
    }
    return floats;
  }
  static Bytes values_of(Bytes both, int shift) {
    for (std::uint8_t& byte : both.of) {
      byte = static_cast<std::uint8_t>(kValuesOfQ4[static_cast<std::size_t>((byte >> shift) & 15)] + 128);
    }
    return both;
  }
  static Bytes values_of_low(const Bytes& both) { return values_of(both, 0); }
  static Bytes values_of_high(const Bytes& both) { return values_of(both, 4); }
  static Floats value(const Bytes& w, int j) {
    Floats floats;
    for (int r = 0; r < kLanes; ++r) floats.of[r] = static_cast<float>(int{w.of[4 * r + j]} - 128);
    return floats;
  }
  static Floats zero() { return all(0.0f); }
  static Floats all(float value) {
    Floats floats;
    std::fill_n(floats.of, kLanes, value);
    return floats;
  }
  static Floats multiply(Floats a, const Floats& b) {
    for (int r = 0; r < kLanes; ++r) a.of[r] *= b.of[r];
    return a;
  }
  static Floats add(Floats a, const Floats& b) {
    for (int r = 0; r < kLanes; ++r) a.of[r] += b.of[r];
    return a;
  }
  static void store(const Floats& value, float* to) { std::memcpy(to, value.of, sizeof(value.of)); }

  static void place(const std::int32_t* values, std::uint8_t* to) { place_pairs(values, to); }
  static Sum begin(std::int32_t offset) {
    Sum sum;
    std::fill_n(sum.of, kLanes, offset);
    return sum;
  }
  static void add_products(Sum& sum, const Bytes& w, const std::uint8_t* x) {
    std::int16_t pairs[4];
    std::memcpy(pairs, x, sizeof(pairs));
    for (int r = 0; r < kLanes; ++r) {
      sum.of[r] +=
          w.of[4 * r] * pairs[0] + w.of[4 * r + 2] * pairs[1] + w.of[4 * r + 1] * pairs[2] + w.of[4 * r + 3] * pairs[3];
    }
  }
  static Floats total(const Sum& sum) {
    Floats floats;
    for (int r = 0; r < kLanes; ++r) floats.of[r] = static_cast<float>(sum.of[r]);
    return floats;
  }
};

#include "flashgla/ops/quantised_linear/cpu/kernel_inl.h"

}  // namespace

const Kernel kPortableKernel = kKernel;

}  // namespace flashgla::ops::quantised_linear
