// Elements of a packed matrix, one by one: for references, look-ups and tests.
#pragma once

#include <algorithm>
#include <cstring>

#include "flashgla/base/float16.h"
#include "flashgla/ops/quantised_linear/quantised_linear.h"

namespace flashgla::ops::quantised_linear {

// Where a code lies behind its block's scales, and which half of the byte it is of q4 (0: low).
struct Place {
  std::int64_t byte;
  int shift;
};
constexpr Place place_of(Format format, std::int64_t row, std::int64_t column) {
  if (format == Format::q8) return {64 * (column / 4) + 4 * row + column % 4, 0};
  return {64 * (column % 16 / 4) + 4 * row + column % 4, column < 16 ? 0 : 4};
}

class Blocks {
 public:
  explicit Blocks(const TensorView& weight)
      : bytes_(weight.as<std::uint8_t>()), groups_(weight.size(1)), format_(format_of(weight)) {}

  const std::uint8_t* block(std::int64_t panel, std::int64_t group) const {
    return bytes_ + (panel * groups_ + group) * block_bytes(format_);
  }
  float scale(std::int64_t row, std::int64_t group) const {
    Float16 scale;
    std::memcpy(&scale.bits, block(row / kPanelRows, group) + 2 * (row % kPanelRows), sizeof(scale.bits));
    return static_cast<float>(scale);
  }
  // -128 to 127
  int value(std::int64_t row, std::int64_t column) const {
    const Place place = place_of(format_, row % kPanelRows, column % kGroup);
    const std::uint8_t byte = block(row / kPanelRows, column / kGroup)[kScaleBytes + place.byte];
    if (format_ == Format::q8) return int{byte} - 128;
    return kValuesOfQ4[(byte >> place.shift) & 15];
  }
  float operator()(std::int64_t row, std::int64_t column) const {
    return scale(row, column / kGroup) * static_cast<float>(value(row, column));
  }
  // The first `columns` of a row.
  void read_row(std::int64_t row, std::int64_t columns, float* to) const {
    for (std::int64_t group = 0; group * kGroup < columns; ++group, to += kGroup) {
      const float factor = scale(row, group);
      const std::uint8_t* codes = block(row / kPanelRows, group) + kScaleBytes;
      const std::int64_t count = std::min(kGroup, columns - group * kGroup);
      for (std::int64_t c = 0; c < count; ++c) {
        const Place place = place_of(format_, row % kPanelRows, c);
        const std::uint8_t byte = codes[place.byte];
        const int value = format_ == Format::q8 ? int{byte} - 128 : int{kValuesOfQ4[(byte >> place.shift) & 15]};
        to[c] = factor * static_cast<float>(value);
      }
    }
  }

 private:
  const std::uint8_t* bytes_;
  std::int64_t groups_;
  Format format_;
};

}  // namespace flashgla::ops::quantised_linear
