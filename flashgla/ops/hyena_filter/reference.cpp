// Definitions, in f64 arithmetic whatever the tensors hold.
#include <cmath>

#include "flashgla/ops/elements.h"
#include "flashgla/ops/hyena_filter/decay.h"
#include "flashgla/ops/hyena_filter/implementations.h"

namespace flashgla::ops::hyena_filter {

namespace {

void reference_sine_forward(Context& context, const TensorView& x, const TensorView& frequency, const TensorView& y) {
  if (context.planning()) return;
  const Elements in(x), factor(frequency), out(y);
  parallel_for(context, in.rows(), [&](std::int64_t row) {
    for (std::int64_t d = 0; d < in.length(); ++d) out.set(row, d, std::sin(factor(d) * in(row, d)));
  });
}

void reference_sine_backward(Context& context, const TensorView& x, const TensorView& frequency, const TensorView& dy,
                             const TensorView& dx, const TensorView& dfrequency) {
  if (context.planning()) return;
  const Elements in(x), factor(frequency), from(dy), to(dx), sums(dfrequency);
  parallel_for(context, in.length(), [&](std::int64_t d) {
    double sum = 0.0;
    for (std::int64_t row = 0; row < in.rows(); ++row) {
      const double slope = from(row, d) * std::cos(factor(d) * in(row, d));
      sum += slope * in(row, d);
      to.set(row, d, slope * factor(d));
    }
    sums.add(d, sum);
  });
}

void reference_window(Context& context, const TensorView& x, const Window& window, const TensorView& y) {
  if (context.planning()) return;
  const Elements in(x), out(y);
  const Decays decays(in.length());
  parallel_for(context, in.rows(), [&](std::int64_t row) {
    const double t = static_cast<double>(row) / static_cast<double>(window.length - 1);
    for (std::int64_t d = 0; d < in.length(); ++d) {
      out.set(row, d,
              in(row, d) * (std::exp(-t * (decays.first + decays.step * static_cast<double>(d))) + window.shift));
    }
  });
}

}  // namespace

const Implementation kReference{"reference",
                                Device::Kind::cpu,
                                [](const Problem&, const Architecture&) { return Support::yes(); },
                                reference_sine_forward,
                                reference_sine_backward,
                                reference_window};

}  // namespace flashgla::ops::hyena_filter
