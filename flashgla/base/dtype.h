// Element types and devices: the vocabulary of every tensor in the library, kernels included, so without <string>
// (names.h).
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashgla {

enum class DType : std::uint8_t { f64, f32, bf16, f16, i64, i32, u16, u8 };

// Bytes of one element.
constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::bf16:
    case DType::f16:
    case DType::u16:
      return 2;
    case DType::u8:
      return 1;
  }
  return 0;
}

constexpr bool is_floating(DType dtype) {
  return dtype == DType::f64 || dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16;
}

// Unit roundoff spacing 2^-(mantissa bits) of a floating type: what test tolerances are derived from.
double epsilon(DType dtype);

// "f32", "bf16", ...
const char* name_of(DType dtype);

struct Device {
  enum class Kind : std::uint8_t { cpu, cuda };
  Kind kind = Kind::cpu;
  int index = 0;

  friend bool operator==(const Device&, const Device&) = default;
  static constexpr Device cpu() { return {Kind::cpu, 0}; }
  static constexpr Device cuda(int index = 0) { return {Kind::cuda, index}; }
};

}  // namespace flashgla
