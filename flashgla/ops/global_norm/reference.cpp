// The definition, in f64, element after element.
#include <cmath>

#include "flashgla/ops/elements.h"
#include "flashgla/ops/global_norm/implementations.h"

namespace flashgla::ops::global_norm {

namespace {

void reference_sum_of_squares(Context& context, const TensorView& x_view, const TensorView& sum) {
  if (context.planning()) return;
  const Elements x(x_view.reshape(Shape({x_view.numel()})));
  double total = 0.0;
  for (std::int64_t i = 0; i < x.length(); ++i) total += x(i) * x(i);
  *sum.as<double>() = total;
}

bool reference_find_non_finite(Context& context, const TensorView& x_view) {
  if (context.planning()) return false;
  const Elements x(x_view.reshape(Shape({x_view.numel()})));
  for (std::int64_t i = 0; i < x.length(); ++i) {
    if (!std::isfinite(x(i))) return true;
  }
  return false;
}

}  // namespace

const Implementation kReference{"reference", Device::Kind::cpu,
                                [](const Problem&, const Architecture&) { return Support::yes(); },
                                reference_sum_of_squares, reference_find_non_finite};

}  // namespace flashgla::ops::global_norm
