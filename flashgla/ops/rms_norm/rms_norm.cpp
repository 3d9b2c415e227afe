#include "flashgla/ops/rms_norm/rms_norm.h"

#include "flashgla/ops/rms_norm/implementations.h"

namespace flashgla::ops::rms_norm {

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
  return select("rms_norm", implementations(), Problem{x.dtype, weight ? weight.dtype : x.dtype},
                context.architecture(), context.forced_implementation());
}

void check_parameters(const Arguments& arguments, const TensorView& x, const TensorView& weight,
                      const TensorView& rstd) {
  if (x.rank() < 1 || x.size(-1) < 1) arguments.fail("x", "has shape " + to_string(x.shape), "[...,D] with D >= 1");
  if (weight) arguments.check("weight", weight, parameters_of(x.dtype), Shape({x.size(-1)}), "x's last dimension");
  if (rstd) {
    arguments.check("rstd", rstd, accumulator_of(x.dtype), Shape({rows_of(x.shape)}), "x's rows", Layout::contiguous);
  }
}

}  // namespace

void forward(Context& context, const Inputs& inputs, const Outputs& outputs, double epsilon) {
  const Arguments arguments("rms_norm", context);
  const TensorView& x = inputs.x;
  arguments.check("x", x, kFloating);
  check_parameters(arguments, x, inputs.weight, outputs.rstd);
  arguments.check("y", outputs.y, x.dtype, x.shape, "x");
  if (!(epsilon >= 0.0)) arguments.fail("epsilon", "is " + std::to_string(epsilon), "at least 0");
  selected(context, x, inputs.weight).forward(context, inputs, outputs, epsilon);
}

void backward(Context& context, const TensorView& x, const TensorView& weight, const TensorView& rstd,
              const TensorView& dy, const TensorView& dx, bool accumulate_dx, const TensorView& dweight) {
  const Arguments arguments("rms_norm", context);
  arguments.check("x", x, kFloating);
  if (!rstd) arguments.fail("rstd", "is absent", "forward's");
  check_parameters(arguments, x, weight, rstd);
  arguments.check("dy", dy, x.dtype, x.shape, "x");
  arguments.check("dx", dx, x.dtype, x.shape, "x");
  if (dweight) {
    if (!weight) arguments.fail("dweight", "is present", "none without weight");
    arguments.check("dweight", dweight, accumulator_of(x.dtype), weight.shape, "weight");
  }
  selected(context, x, weight).backward(context, x, weight, rstd, dy, dx, accumulate_dx, dweight);
}

}  // namespace flashgla::ops::rms_norm
