// From a matrix of floats to a packed one.
#pragma once

#include <cstdint>
#include <span>

#include "flashgla/base/context.h"
#include "flashgla/ops/quantised_linear/quantised_linear.h"

namespace flashgla::ops::quantised_linear {

// One group of a row: the f16 scale and codes, of some twenty scales tried and refitted by least squares, with the
// least sum_i importance[i] (x[i] - scale value(code[i]))^2. importance empty: ones.
struct QuantisedGroup {
  float scale = 0.0f;  // a number that f16 has
  std::uint8_t codes[kGroup];
  double error = 0.0;
};
QuantisedGroup quantise_group(Format format, std::span<const float> x, std::span<const float> importance);

// The code whose value is nearest to x / scale.
std::uint8_t nearest_code(Format format, float x, float scale);
int value_of(Format format, std::uint8_t code);

// Puts a group into its block.
void store_group(const TensorView& packed, std::int64_t row, std::int64_t group, const QuantisedGroup& quantised);

// values f32 [N,K], contiguous; importance absent or f32 [K] (mean squares of the inputs, say); packed as packed_shape
// has it. Throws Error that names the place of a value that is not finite or too large for f16 scales.
void quantise(Context& context, const TensorView& values, const TensorView& importance, const TensorView& packed);

}  // namespace flashgla::ops::quantised_linear
