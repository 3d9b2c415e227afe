#include "flashgla/ops/hyena_filter/hyena_filter.h"

#include <cmath>

#include "flashgla/ops/arguments.h"
#include "flashgla/ops/elements.h"
#include "flashgla/ops/hyena_filter/decay.h"

namespace flashgla::ops::hyena_filter {

namespace {

constexpr const char* kName = "hyena_filter";

void check_rows(const Arguments& arguments, const TensorView& x) {
  arguments.check("x", x, kFloating);
  arguments.check_rank("x", x, 2);
  if (x.device.kind != Device::Kind::cpu)
    arguments.fail("x", "is on a GPU", "the CPU: there are no kernels for it yet");
}

void check_frequency(const Arguments& arguments, const TensorView& x, const TensorView& frequency) {
  arguments.check("frequency", frequency, parameters_of(x.dtype), Shape({x.size(1)}), "x's channels",
                  Layout::contiguous);
}

}  // namespace

void sine_forward(Context& context, const TensorView& x, const TensorView& frequency, const TensorView& y) {
  const Arguments arguments(kName, context);
  check_rows(arguments, x);
  check_frequency(arguments, x, frequency);
  arguments.check("y", y, x.dtype, x.shape, "x");
  if (context.planning()) return;
  const Elements in(x), factor(frequency), out(y);
  parallel_for(context, in.rows(), [&](std::int64_t row) {
    for (std::int64_t d = 0; d < in.length(); ++d) out.set(row, d, std::sin(factor(d) * in(row, d)));
  });
}

void sine_backward(Context& context, const TensorView& x, const TensorView& frequency, const TensorView& dy,
                   const TensorView& dx, const TensorView& dfrequency) {
  const Arguments arguments(kName, context);
  check_rows(arguments, x);
  check_frequency(arguments, x, frequency);
  arguments.check("dy", dy, x.dtype, x.shape, "x");
  arguments.check("dx", dx, x.dtype, x.shape, "x");
  arguments.check("dfrequency", dfrequency, accumulator_of(x.dtype), frequency.shape, "frequency", Layout::contiguous);
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

void window(Context& context, const TensorView& x, const Window& window, const TensorView& y) {
  const Arguments arguments(kName, context);
  check_rows(arguments, x);
  arguments.check("y", y, kFloating, x.shape, "x");
  if (window.length < 2 || x.size(0) > window.length) {
    arguments.fail("length", "is " + std::to_string(window.length),
                   "at least 2 and x's " + std::to_string(x.size(0)) + " rows");
  }
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

}  // namespace flashgla::ops::hyena_filter
