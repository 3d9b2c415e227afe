#include "testing/random.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>

#include "flashgla/base/context.h"

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

void fill_by_index(const TensorView& view, const std::function<double(std::uint64_t)>& value) {
  if (!view.is_contiguous()) {
    const Tensor packed = Tensor::empty(view.shape, view.dtype);
    fill_by_index(packed, value);
    copy(packed, view);
    return;
  }
  constexpr std::int64_t kGrain = 1 << 14;
  dispatch_floating(view.dtype, [&](auto zero) {
    using T = decltype(zero);
    T* out = view.as<T>();
    parallel_for_blocks(Context(), view.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) out[i] = static_cast<T>(value(static_cast<std::uint64_t>(i)));
    });
  });
}

void fill_normal(const TensorView& view, std::uint64_t seed, double deviation, double mean) {
  fill_by_index(view, [=](std::uint64_t i) { return mean + deviation * normal(seed, i); });
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
