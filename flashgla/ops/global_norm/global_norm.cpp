#include "flashgla/ops/global_norm/global_norm.h"

#include "flashgla/ops/global_norm/implementations.h"

namespace flashgla::ops::global_norm {

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
  Arguments("global_norm", context).check("x", x, kFloating, Layout::contiguous);
  return select("global_norm", implementations(), Problem{x.dtype}, context.architecture(),
                context.forced_implementation());
}
}  // namespace

void sum_of_squares(Context& context, const TensorView& x, const TensorView& sum) {
  const Implementation& implementation = selected(context, x);
  Arguments("global_norm", context).check("sum", sum, DType::f64, Shape({1}), "one sum");
  implementation.sum_of_squares(context, x, sum);
}

bool find_non_finite(Context& context, const TensorView& x) { return selected(context, x).find_non_finite(context, x); }

}  // namespace flashgla::ops::global_norm
