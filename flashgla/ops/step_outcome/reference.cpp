// The definitions, which are fast enough on the CPU: a few numbers a token, or nothing at all.
#include <array>
#include <cmath>
#include <cstring>

#include "flashgla/ops/step_outcome/implementations.h"

namespace flashgla::ops::step_outcome {

namespace {

void reference_sum(Context&, const TensorView& x, const TensorView& total, bool accumulate) {
  std::array<double, kLanes> lanes{};
  dispatch_floating(x.dtype, [&](auto zero) {
    const auto* values = x.as<decltype(zero)>();
    for (std::int64_t i = 0; i < x.numel(); ++i)
      lanes[static_cast<std::size_t>(i % kLanes)] += static_cast<double>(values[i]);
  });
  for (std::size_t half = kLanes / 2; half > 0; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  *total.as<double>() = (accumulate ? *total.as<double>() : 0.0) + lanes[0];
}

void reference_clear_unless(Context&, const TensorView& made, const TensorView& view) {
  if (*made.as<double>() == 0.0) std::memset(view.data, 0, view.bytes());
}

void reference_find_unless(Context&, const TensorView& made, const TensorView& x, const TensorView& first) {
  *first.as<std::int64_t>() = -1;
  if (*made.as<double>() != 0.0) return;
  dispatch_floating(x.dtype, [&](auto zero) {
    const auto* values = x.as<decltype(zero)>();
    for (std::int64_t i = 0; i < x.numel(); ++i) {
      if (std::isfinite(static_cast<double>(values[i]))) continue;
      *first.as<std::int64_t>() = i;
      return;
    }
  });
}

}  // namespace

const Implementation kReference{
    "reference",   Device::Kind::cpu,      [](const Problem&, const Architecture&) { return Support::yes(); },
    reference_sum, reference_clear_unless, reference_find_unless};

}  // namespace flashgla::ops::step_outcome
