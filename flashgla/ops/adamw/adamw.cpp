#include "flashgla/ops/adamw/adamw.h"

#include "flashgla/ops/adamw/implementations.h"

namespace flashgla::ops::adamw {

std::span<const Implementation> implementations() {
#ifdef FLASHGLA_CUDA
  static const Implementation table[] = {kCuda, kSimd, kReference};
#else
  static const Implementation table[] = {kSimd, kReference};
#endif
  return table;
}

namespace {

void check_common(const Arguments& arguments, const TensorView& scalars, const Settings& settings) {
  arguments.check("scalars", scalars, DType::f64, Shape({kStepScalars}), "StepScalars", Layout::contiguous);
  auto in_unit_interval = [&](const char* name, double value) {
    if (!(value >= 0.0 && value < 1.0)) arguments.fail(name, "is " + std::to_string(value), "in [0, 1)");
  };
  in_unit_interval("beta1", settings.beta1);
  in_unit_interval("beta2", settings.beta2);
}

const Implementation& selected(const Context& context, DType dtype) {
  return select("adamw", implementations(), Problem{dtype}, context.architecture(), context.forced_implementation());
}

}  // namespace

void prepare(Context& context, const TensorView& sum_of_squares, const TensorView& loss, const TensorView& scalars,
             const Settings& settings) {
  const Arguments arguments("adamw", context);
  arguments.check("sum_of_squares", sum_of_squares, DType::f64, Shape({1}), "one sum");
  if (loss) arguments.check("loss", loss, {DType::f64, DType::f32}, Shape({1}), "one sum");
  check_common(arguments, scalars, settings);
  const Implementation& implementation = selected(context, DType::f32);
  if (!context.planning()) implementation.prepare(context, sum_of_squares, loss, scalars, settings);
}

void step(Context& context, const Tensors& tensors, const Settings& settings) {
  const Arguments arguments("adamw", context);
  const TensorView& parameter = tensors.parameter;
  arguments.check("parameter", parameter, {DType::f64, DType::f32, DType::bf16}, Layout::contiguous);
  const DType wide = accumulator_of(parameter.dtype);
  auto check = [&](const char* name, const TensorView& view, DTypes dtypes) {
    arguments.check(name, view, dtypes, parameter.shape, "parameter", Layout::contiguous);
  };
  check("gradient", tensors.gradient, wide);
  check("first_moment", tensors.first_moment, wide == DType::f64 ? DTypes{wide} : DTypes{wide, DType::bf16});
  check("second_moment", tensors.second_moment, tensors.first_moment.dtype);
  if (parameter.dtype == DType::bf16) {
    check("master", tensors.master, {DType::f32, DType::u16});
  } else {
    arguments.check_absent("master", tensors.master, "beside a parameter that is not bf16");
  }
  if (tensors.boundaries) {
    arguments.check("boundaries", tensors.boundaries, DType::i64, Layout::contiguous);
    arguments.check_rank("boundaries", tensors.boundaries, 1);
  }
  check_common(arguments, tensors.scalars, settings);
  const Implementation& implementation = selected(context, parameter.dtype);
  if (!context.planning()) implementation.step(context, tensors, settings);
}

void prepare_on_cpu(Context&, const TensorView& sum_of_squares, const TensorView& loss, const TensorView& scalars,
                    const Settings& settings) {
  double value = 0.0;
  if (loss) value = loss.dtype == DType::f64 ? *loss.as<double>() : static_cast<double>(*loss.as<float>());
  scalars_in(scalars) = prepared(scalars_in(scalars), *sum_of_squares.as<double>(), value, settings);
}

}  // namespace flashgla::ops::adamw
