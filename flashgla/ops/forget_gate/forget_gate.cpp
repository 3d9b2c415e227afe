#include "flashgla/ops/forget_gate/forget_gate.h"

#include "flashgla/ops/forget_gate/implementations.h"

namespace flashgla::ops::forget_gate {

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
  return select("forget_gate", implementations(), Problem{x.dtype}, context.architecture(),
                context.forced_implementation());
}

void check_inputs(const Arguments& arguments, const TensorView& x, const TensorView& bound, double normalizer) {
  arguments.check("x", x, kFloating);
  if (bound) arguments.check("bound", bound, accumulator_of(x.dtype), x.shape, "x");
  if (!(normalizer > 0.0)) arguments.fail("normalizer", "is " + std::to_string(normalizer), "more than 0");
}

}  // namespace

void forward(Context& context, const TensorView& x, const TensorView& bound, const TensorView& g, const TensorView& k,
             double normalizer) {
  const Arguments arguments("forget_gate", context);
  check_inputs(arguments, x, bound, normalizer);
  arguments.check("g", g, x.dtype, x.shape, "x");
  arguments.check("k", k, x.dtype, x.shape, "x");
  const Implementation& implementation = selected(context, x);
  if (!context.planning()) implementation.forward(context, x, bound, g, k, normalizer);
}

void backward(Context& context, const TensorView& x, const TensorView& bound, const TensorView& dg,
              const TensorView& dk, const TensorView& dx, const TensorView& dbound, double normalizer) {
  const Arguments arguments("forget_gate", context);
  check_inputs(arguments, x, bound, normalizer);
  arguments.check("dg", dg, x.dtype, x.shape, "x");
  arguments.check("dk", dk, x.dtype, x.shape, "x");
  arguments.check("dx", dx, x.dtype, x.shape, "x");
  if (bound) {
    arguments.check("dbound", dbound, accumulator_of(x.dtype), x.shape, "x");
  } else {
    arguments.check_absent("dbound", dbound, "without bound");
  }
  const Implementation& implementation = selected(context, x);
  if (!context.planning()) implementation.backward(context, x, bound, dg, dk, dx, dbound, normalizer);
}

}  // namespace flashgla::ops::forget_gate
