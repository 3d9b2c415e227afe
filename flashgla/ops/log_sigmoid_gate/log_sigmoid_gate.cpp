#include "flashgla/ops/log_sigmoid_gate/log_sigmoid_gate.h"

#include "flashgla/ops/log_sigmoid_gate/implementations.h"

namespace flashgla::ops::log_sigmoid_gate {

std::span<const Implementation> implementations() {
#ifdef FLASHGLA_CUDA
  static const Implementation table[] = {kCuda, kSimd, kReference};
#else
  static const Implementation table[] = {kSimd, kReference};
#endif
  return table;
}

namespace {

const Implementation& selected(const Context& context, const TensorView& x, const TensorView& g) {
  return select("log_sigmoid_gate", implementations(), Problem{x.dtype, g.dtype}, context.architecture(),
                context.forced_implementation());
}

DTypes gates_of(DType dtype) { return {dtype, accumulator_of(dtype)}; }

void check_settings(const Arguments& arguments, double normalizer, double clamp_min) {
  if (!(normalizer > 0.0)) arguments.fail("normalizer", "is " + std::to_string(normalizer), "more than 0");
  if (!(clamp_min <= 0.0)) arguments.fail("clamp_min", "is " + std::to_string(clamp_min), "at most 0");
}

}  // namespace

void forward(Context& context, const TensorView& x, const TensorView& g, double normalizer, double clamp_min) {
  const Arguments arguments("log_sigmoid_gate", context);
  arguments.check("x", x, kFloating);
  arguments.check("g", g, gates_of(x.dtype), x.shape, "x");
  check_settings(arguments, normalizer, clamp_min);
  const Implementation& implementation = selected(context, x, g);
  if (!context.planning()) implementation.forward(context, x, g, normalizer, clamp_min);
}

void backward(Context& context, const TensorView& x, const TensorView& dg, const TensorView& dx, double normalizer,
              double clamp_min) {
  const Arguments arguments("log_sigmoid_gate", context);
  arguments.check("x", x, kFloating);
  arguments.check("dg", dg, gates_of(x.dtype), x.shape, "x");
  arguments.check("dx", dx, x.dtype, x.shape, "x");
  check_settings(arguments, normalizer, clamp_min);
  const Implementation& implementation = selected(context, x, dg);
  if (!context.planning()) implementation.backward(context, x, dg, dx, normalizer, clamp_min);
}

}  // namespace flashgla::ops::log_sigmoid_gate
