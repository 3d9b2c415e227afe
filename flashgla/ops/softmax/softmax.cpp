#include "flashgla/ops/softmax/softmax.h"

#include "flashgla/ops/softmax/implementations.h"

namespace flashgla::ops::softmax {

std::span<const Implementation> implementations() {
#ifdef FLASHGLA_CUDA
  static const Implementation table[] = {kCuda, kSimd, kReference};
#else
  static const Implementation table[] = {kSimd, kReference};
#endif
  return table;
}

namespace {

const Implementation& selected(const Context& context, const TensorView& x) {
  return select("softmax", implementations(), Problem{x.dtype}, context.architecture(),
                context.forced_implementation());
}

void check_first(const Arguments& arguments, const char* name, const TensorView& x) {
  arguments.check(name, x, kFloating);
  if (x.rank() < 1 || x.size(-1) < 1) arguments.fail(name, "has shape " + to_string(x.shape), "[...,D] with D >= 1");
}

}  // namespace

void forward(Context& context, const TensorView& x, const TensorView& y) {
  const Arguments arguments("softmax", context);
  check_first(arguments, "x", x);
  arguments.check("y", y, x.dtype, x.shape, "x");
  const Implementation& implementation = selected(context, x);
  if (!context.planning()) implementation.forward(context, x, y);
}

void backward(Context& context, const TensorView& y, const TensorView& dy, const TensorView& dx) {
  const Arguments arguments("softmax", context);
  check_first(arguments, "y", y);
  arguments.check("dy", dy, y.dtype, y.shape, "y");
  arguments.check("dx", dx, y.dtype, y.shape, "y");
  const Implementation& implementation = selected(context, y);
  if (!context.planning()) implementation.backward(context, y, dy, dx);
}

}  // namespace flashgla::ops::softmax
