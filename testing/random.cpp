#include "testing/random.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>

namespace flashgla::testing {

namespace {
// SplitMix64's output function over a counter.
std::uint64_t mix(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}
}  // namespace

double uniform(std::uint64_t seed, std::uint64_t index) {
  const std::uint64_t bits = mix(mix(seed + 0x9e3779b97f4a7c15ull) + index * 0x9e3779b97f4a7c15ull);
  return (static_cast<double>(bits >> 11) + 0.5) * 0x1.0p-53;
}

double normal(std::uint64_t seed, std::uint64_t index) {
  const double radius = std::sqrt(-2.0 * std::log(uniform(seed, 2 * index)));
  return radius * std::cos(2.0 * std::numbers::pi * uniform(seed, 2 * index + 1));
}

void fill_normal(const TensorView& view, std::uint64_t seed, double deviation, double mean) {
  if (!view.is_contiguous()) {
    Tensor packed = random_normal(view.shape, view.dtype, seed, deviation, mean);
    copy(packed, view);
    return;
  }
  dispatch_floating(view.dtype, [&](auto zero) {
    using T = decltype(zero);
    T* out = view.as<T>();
    for (std::int64_t i = 0; i < view.numel(); ++i) {
      out[i] = static_cast<T>(mean + deviation * normal(seed, static_cast<std::uint64_t>(i)));
    }
  });
}

Tensor random_normal(const Shape& shape, DType dtype, std::uint64_t seed, double deviation, double mean) {
  Tensor tensor = Tensor::empty(shape, dtype);
  fill_normal(tensor, seed, deviation, mean);
  return tensor;
}

void poison(const TensorView& view) {
  if (is_floating(view.dtype)) {
    fill(view, std::numeric_limits<double>::quiet_NaN());
  } else {
    std::memset(view.data, 0x7f, view.bytes());
  }
}

}  // namespace flashgla::testing
