// Seeded random tensors for tests and benches.
#pragma once

#include <cstdint>
#include <functional>

#include "flashgla/base/tensor.h"

namespace flashgla::testing {

// Counter-based generator: value i of seed s never depends on how much was drawn before.
double uniform(std::uint64_t seed, std::uint64_t index);  // in (0, 1)
double normal(std::uint64_t seed, std::uint64_t index);   // standard normal

// Standard normal times `deviation` plus `mean`, on the CPU.
Tensor random_normal(const Shape& shape, DType dtype, std::uint64_t seed, double deviation = 1.0, double mean = 0.0);
void fill_normal(const TensorView& view, std::uint64_t seed, double deviation = 1.0, double mean = 0.0);

// Element i (row-major) of the view, on the CPU, becomes value(i). On all threads: value must depend on i alone.
void fill_by_index(const TensorView& view, const std::function<double(std::uint64_t)>& value);

// Fills with NaN (integers: the largest value), so that an element nobody writes is seen.
void poison(const TensorView& view);

}  // namespace flashgla::testing
