#include "flashgla/ops/rms_norm_swish_gate/rms_norm_swish_gate.h"

#include "flashgla/ops/rms_norm_swish_gate/implementations.h"

namespace flashgla::ops::rms_norm_swish_gate {

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
  return select("rms_norm_swish_gate", implementations(), Problem{x.dtype, weight ? weight.dtype : x.dtype},
                context.architecture(), context.forced_implementation());
}

void check_inputs(const Arguments& arguments, const TensorView& x, const TensorView& gate, const TensorView& weight,
                  const TensorView& rstd) {
  arguments.check("x", x, kFloating);
  if (x.rank() < 1 || x.size(-1) < 1) arguments.fail("x", "has shape " + to_string(x.shape), "[...,D] with D >= 1");
  arguments.check("gate", gate, x.dtype, x.shape, "x");
  if (weight) arguments.check("weight", weight, parameters_of(x.dtype), Shape({x.size(-1)}), "x's last dimension");
  if (rstd) {
    arguments.check("rstd", rstd, accumulator_of(x.dtype), Shape({rows_of(x.shape)}), "x's rows", Layout::contiguous);
  }
}

}  // namespace

void forward(Context& context, const TensorView& x, const TensorView& gate, const TensorView& weight,
             const TensorView& y, const TensorView& rstd, double epsilon) {
  const Arguments arguments("rms_norm_swish_gate", context);
  check_inputs(arguments, x, gate, weight, rstd);
  arguments.check("y", y, x.dtype, x.shape, "x");
  if (!(epsilon >= 0.0)) arguments.fail("epsilon", "is " + std::to_string(epsilon), "at least 0");
  selected(context, x, weight).forward(context, x, gate, weight, y, rstd, epsilon);
}

void backward(Context& context, const TensorView& x, const TensorView& gate, const TensorView& weight,
              const TensorView& rstd, const TensorView& dy, const TensorView& dx, const TensorView& dgate,
              const TensorView& dweight) {
  const Arguments arguments("rms_norm_swish_gate", context);
  if (!rstd) arguments.fail("rstd", "is absent", "forward's");
  check_inputs(arguments, x, gate, weight, rstd);
  arguments.check("dy", dy, x.dtype, x.shape, "x");
  arguments.check("dx", dx, x.dtype, x.shape, "x");
  arguments.check("dgate", dgate, x.dtype, x.shape, "x");
  if (dweight) {
    if (!weight) arguments.fail("dweight", "is present", "none without weight");
    arguments.check("dweight", dweight, accumulator_of(x.dtype), weight.shape, "weight");
  }
  selected(context, x, weight).backward(context, x, gate, weight, rstd, dy, dx, dgate, dweight);
}

}  // namespace flashgla::ops::rms_norm_swish_gate
