#include "flashgla/ops/hyena_filter/hyena_filter.h"

#include "flashgla/ops/hyena_filter/implementations.h"

namespace flashgla::ops::hyena_filter {

std::span<const Implementation> implementations() {
#ifdef FLASHGLA_CUDA
  static const Implementation table[] = {kCuda, kSimd, kReference};
#else
  static const Implementation table[] = {kSimd, kReference};
#endif
  return table;
}

namespace {

constexpr const char* kName = "hyena_filter";

const Implementation& selected(const Context& context, const TensorView& x, const TensorView& y) {
  return select(kName, implementations(), Problem{x.dtype, y.dtype}, context.architecture(),
                context.forced_implementation());
}

void check_rows(const Arguments& arguments, const TensorView& x) {
  arguments.check("x", x, kFloating);
  arguments.check_rank("x", x, 2);
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
  selected(context, x, y).sine_forward(context, x, frequency, y);
}

void sine_backward(Context& context, const TensorView& x, const TensorView& frequency, const TensorView& dy,
                   const TensorView& dx, const TensorView& dfrequency) {
  const Arguments arguments(kName, context);
  check_rows(arguments, x);
  check_frequency(arguments, x, frequency);
  arguments.check("dy", dy, x.dtype, x.shape, "x");
  arguments.check("dx", dx, x.dtype, x.shape, "x");
  arguments.check("dfrequency", dfrequency, accumulator_of(x.dtype), frequency.shape, "frequency", Layout::contiguous);
  selected(context, x, dx).sine_backward(context, x, frequency, dy, dx, dfrequency);
}

void window(Context& context, const TensorView& x, const Window& window, const TensorView& y) {
  const Arguments arguments(kName, context);
  check_rows(arguments, x);
  arguments.check("y", y, kFloating, x.shape, "x");
  if (window.length < 2 || x.size(0) > window.length) {
    arguments.fail("length", "is " + std::to_string(window.length),
                   "at least 2 and x's " + std::to_string(x.size(0)) + " rows");
  }
  selected(context, x, y).window(context, x, window, y);
}

}  // namespace flashgla::ops::hyena_filter
