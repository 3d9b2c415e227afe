// Seeded random tensors for tests and benches.
#pragma once

#include <cstdint>
#include <functional>

#include "flashgla/base/random.h"
#include "flashgla/base/tensor.h"

namespace flashgla::testing {

// Counter-based generator: value i of seed s never depends on how much was drawn before.
double uniform(std::uint64_t seed, std::uint64_t index);  // in (0, 1)
double normal(std::uint64_t seed, std::uint64_t index);   // standard normal

// 64 bits at a time, in order, for tests that draw as they go.
class Draws {
 public:
  explicit Draws(std::uint64_t seed) : stream_(seed, random::Use::tests) {}
  std::uint64_t operator()() { return stream_.words(drawn_++).first; }

 private:
  random::Stream stream_;
  std::uint64_t drawn_ = 0;
};

// Standard normal times `deviation` plus `mean`, on the CPU.
Tensor random_normal(const Shape& shape, DType dtype, std::uint64_t seed, double deviation = 1.0, double mean = 0.0);
void fill_normal(const TensorView& view, std::uint64_t seed, double deviation = 1.0, double mean = 0.0);

// Element i (row-major) of the view, on the CPU, becomes value(i). On all threads: value must depend on i alone.
void fill_by_index(const TensorView& view, const std::function<double(std::uint64_t)>& value);

// Fills with NaN (integers: the largest value), so that an element nobody writes is seen.
void poison(const TensorView& view);

}  // namespace flashgla::testing
