#include "flashgla/ops/layer_norm/layer_norm.h"

#include "flashgla/ops/layer_norm/implementations.h"

namespace flashgla::ops::layer_norm {

std::span<const Implementation> implementations() {
#ifdef FLASHGLA_CUDA
  static const Implementation table[] = {kCuda, kSimd, kReference};
#else
  static const Implementation table[] = {kSimd, kReference};
#endif
  return table;
}

namespace {

const Implementation& selected(const Context& context, const TensorView& x, const TensorView& weight) {
  return select("layer_norm", implementations(), Problem{x.dtype, weight.dtype}, context.architecture(),
                context.forced_implementation());
}

void check_input(const Arguments& arguments, const TensorView& x, const TensorView& weight) {
  arguments.check("x", x, kFloating);
  if (x.rank() < 1 || x.size(-1) < 1) arguments.fail("x", "has shape " + to_string(x.shape), "[...,D] with D >= 1");
  arguments.check("weight", weight, parameters_of(x.dtype), Shape({x.size(-1)}), "x's last dimension");
}

void check_of_rows(const Arguments& arguments, const char* name, const TensorView& view, const TensorView& x) {
  arguments.check(name, view, accumulator_of(x.dtype), Shape({rows_of(x.shape)}), "x's rows", Layout::contiguous);
}

}  // namespace

void forward(Context& context, const Inputs& inputs, const Outputs& outputs, double epsilon) {
  const Arguments arguments("layer_norm", context);
  const TensorView& x = inputs.x;
  check_input(arguments, x, inputs.weight);
  arguments.check("bias", inputs.bias, inputs.weight.dtype, inputs.weight.shape, "weight");
  arguments.check("y", outputs.y, x.dtype, x.shape, "x");
  if (outputs.rstd) {
    check_of_rows(arguments, "mean", outputs.mean, x);
    check_of_rows(arguments, "rstd", outputs.rstd, x);
  } else {
    arguments.check_absent("mean", outputs.mean, "without rstd");
  }
  if (!(epsilon >= 0.0)) arguments.fail("epsilon", "is " + std::to_string(epsilon), "at least 0");
  selected(context, x, inputs.weight).forward(context, inputs, outputs, epsilon);
}

void backward(Context& context, const TensorView& x, const TensorView& weight, const TensorView& mean,
              const TensorView& rstd, const TensorView& dy, const TensorView& dx, bool accumulate_dx,
              const TensorView& dweight) {
  const Arguments arguments("layer_norm", context);
  check_input(arguments, x, weight);
  check_of_rows(arguments, "mean", mean, x);
  check_of_rows(arguments, "rstd", rstd, x);
  arguments.check("dy", dy, x.dtype, x.shape, "x");
  arguments.check("dx", dx, x.dtype, x.shape, "x");
  arguments.check("dweight", dweight, accumulator_of(x.dtype), weight.shape, "weight");
  selected(context, x, weight).backward(context, {x, weight, mean, rstd, dy, dx, accumulate_dx, dweight});
}

}  // namespace flashgla::ops::layer_norm
