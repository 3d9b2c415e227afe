#include "flashgla/ops/cross_entropy/cross_entropy.h"

#include "flashgla/ops/cross_entropy/implementations.h"

namespace flashgla::ops::cross_entropy {

std::span<const Implementation> implementations() {
  static const Implementation table[] = {
#ifdef FLASHGLA_CUDA
      kCuda,
#endif
      kSimd, kReference};
  return table;
}

namespace {

void check_inputs(const Arguments& arguments, const Context& context, const Inputs& inputs, const TensorView& losses) {
  const TensorView& x = inputs.x;
  const TensorView& weight = inputs.weight;
  arguments.check("x", x, {DType::f64, DType::f32, DType::bf16});
  arguments.check_rank("x", x, 2);
  arguments.check("weight", weight, x.dtype == DType::f32 ? DTypes{DType::f32, DType::bf16} : DTypes{x.dtype});
  if (weight.rank() != 2 || weight.size(1) != x.size(1) || weight.size(0) < 1) {
    arguments.fail("weight", "has shape " + to_string(weight.shape),
                   "[V," + std::to_string(x.size(1)) + "] (x's last dimension)");
  }
  const Shape rows({x.size(0)});
  arguments.check("targets", inputs.targets, DType::i32, rows, "x's rows", Layout::contiguous);
  arguments.check("losses", losses, accumulator_of(x.dtype), rows, "x's rows", Layout::contiguous);
  if (inputs.bad_target) arguments.check("bad_target", inputs.bad_target, DType::i32, Shape({1}), "one number");
  if (context.planning() || context.device().kind != Device::Kind::cpu) return;  // a GPU kernel checks its own
  const auto* target = inputs.targets.as<std::int32_t>();
  for (std::int64_t row = 0; row < x.size(0); ++row) {
    if (target[row] < -1 || target[row] >= weight.size(0)) {
      arguments.fail("targets", "holds " + std::to_string(target[row]) + " at row " + std::to_string(row),
                     "-1 to " + std::to_string(weight.size(0) - 1));
    }
  }
}

const Implementation& selected(const Context& context, const Inputs& inputs) {
  return select("cross_entropy", implementations(), Problem{inputs.x.dtype, inputs.weight.dtype},
                context.architecture(), context.forced_implementation());
}

}  // namespace

void forward(Context& context, const Inputs& inputs, const TensorView& losses, const TensorView& hits) {
  const Arguments arguments("cross_entropy", context);
  check_inputs(arguments, context, inputs, losses);
  if (hits) arguments.check("hits", hits, losses.dtype, losses.shape, "losses", Layout::contiguous);
  selected(context, inputs).run(context, inputs, {losses, hits}, Gradients{});
}

void forward_backward(Context& context, const Inputs& inputs, const TensorView& losses, const TensorView& dx,
                      const TensorView& dweight, double gradient_scale) {
  const Arguments arguments("cross_entropy", context);
  check_inputs(arguments, context, inputs, losses);
  arguments.check("dx", dx, inputs.x.dtype, inputs.x.shape, "x");
  if (dweight) arguments.check("dweight", dweight, accumulator_of(inputs.x.dtype), inputs.weight.shape, "weight");
  selected(context, inputs).run(context, inputs, {losses, {}}, Gradients{dx, dweight, gradient_scale});
}

}  // namespace flashgla::ops::cross_entropy
