#include "flashgla/ops/dropout/dropout.h"

#include "flashgla/ops/dropout/implementations.h"
#include "flashgla/ops/dropout/mask.h"

namespace flashgla::ops::dropout {

std::span<const Implementation> implementations() {
#ifdef FLASHGLA_CUDA
  static const Implementation table[] = {kCuda, kSimd, kReference};
#else
  static const Implementation table[] = {kSimd, kReference};
#endif
  return table;
}

void check(const Arguments& arguments, const Mask& mask) {
  if (!(mask.probability >= 0.0 && mask.probability < 1.0)) {
    arguments.fail("mask.probability", "is " + std::to_string(mask.probability), "in [0, 1)");
  }
  if (mask.place < 0 || mask.place > 0xffff) {
    arguments.fail("mask.place", "is " + std::to_string(mask.place), "0 to 65535");
  }
  arguments.check("mask.step", mask.step, DType::f64, Shape({1}), "one number");
  arguments.check("mask.micro_batch", mask.micro_batch, DType::i32, Shape({1}), "one number");
}

void run(Context& context, const TensorView& x, const TensorView& residual, const TensorView& out, const Mask& mask) {
  const Arguments arguments("dropout", context);
  arguments.check("x", x, kFloating, Layout::contiguous);
  if (residual) arguments.check("residual", residual, x.dtype, x.shape, "x", Layout::contiguous);
  arguments.check("out", out, x.dtype, x.shape, "x", Layout::contiguous);
  check(arguments, mask);
  const Implementation& implementation =
      select("dropout", implementations(), Problem{x.dtype}, context.architecture(), context.forced_implementation());
  if (!context.planning()) implementation.run(context, x, residual, out, mask);
}

}  // namespace flashgla::ops::dropout
