#include "flashgla/ops/adamw/adamw.h"

#include "flashgla/ops/adamw/implementations.h"

namespace flashgla::ops::adamw {

std::span<const Implementation> implementations() {
  static const Implementation table[] = {kSimd, kReference};
  return table;
}

void step(Context& context, const Tensors& tensors, const Settings& settings) {
  const Arguments arguments("adamw", context);
  const TensorView& parameter = tensors.parameter;
  arguments.check("parameter", parameter, {DType::f64, DType::f32, DType::bf16}, Layout::contiguous);
  const DType kept = accumulator_of(parameter.dtype);
  auto check = [&](const char* name, const TensorView& view) {
    arguments.check(name, view, kept, parameter.shape, "parameter", Layout::contiguous);
  };
  check("gradient", tensors.gradient);
  check("first_moment", tensors.first_moment);
  check("second_moment", tensors.second_moment);
  if (parameter.dtype == DType::bf16) {
    check("master", tensors.master);
  } else {
    arguments.check_absent("master", tensors.master, "beside a parameter that is not bf16");
  }
  auto in_unit_interval = [&](const char* name, double value) {
    if (!(value >= 0.0 && value < 1.0)) arguments.fail(name, "is " + std::to_string(value), "in [0, 1)");
  };
  in_unit_interval("beta1", settings.beta1);
  in_unit_interval("beta2", settings.beta2);
  if (settings.step < 1) arguments.fail("step", "is " + std::to_string(settings.step), "1 or more");
  const Implementation& implementation = select("adamw", implementations(), Problem{parameter.dtype},
                                                context.architecture(), context.forced_implementation());
  if (!context.planning()) implementation.step(context, tensors, settings);
}

}  // namespace flashgla::ops::adamw
