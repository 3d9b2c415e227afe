// The definition, in f64.
#include <algorithm>
#include <cmath>

#include "flashgla/ops/elements.h"
#include "flashgla/ops/rotary/implementations.h"

namespace flashgla::ops::rotary {

namespace {

void reference_run(Context& context, const TensorView& x, const TensorView& positions, const TensorView& cu_seqlens,
                   double base, Direction direction, const TensorView& y) {
  const Elements in(x), out(y);
  const std::int64_t length = x.size(1), heads = x.size(2), half = x.size(3) / 2;
  parallel_for(context, x.size(0) * length, [&](std::int64_t token) {
    std::int64_t end = 0;
    const std::int64_t p = position_at(positions, cu_seqlens, token / length, token % length, length, end);
    for (std::int64_t j = 0; j < half; ++j) {
      const double frequency = std::pow(base, -static_cast<double>(j) / static_cast<double>(half));
      const double phi = (direction == Direction::forward ? 1.0 : -1.0) * static_cast<double>(p) * frequency;
      for (std::int64_t row = token * heads; row < (token + 1) * heads; ++row) {
        const double a = in(row, j), b = in(row, j + half);
        out.set(row, j, a * std::cos(phi) - b * std::sin(phi));
        out.set(row, j + half, b * std::cos(phi) + a * std::sin(phi));
      }
    }
  });
}

}  // namespace

const Implementation kReference{"reference", Device::Kind::cpu,
                                [](const Problem&, const Architecture&) { return Support::yes(); }, reference_run};

}  // namespace flashgla::ops::rotary
