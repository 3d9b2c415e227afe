#include "flashgla/ops/global_norm/global_norm.h"

#include "flashgla/ops/global_norm/implementations.h"

namespace flashgla::ops::global_norm {

std::span<const Implementation> implementations() {
  static const Implementation table[] = {kSimd, kReference};
  return table;
}

namespace {
const Implementation& selected(const Context& context, const TensorView& x) {
  Arguments("global_norm", context).check("x", x, kFloating, Layout::contiguous);
  return select("global_norm", implementations(), Problem{x.dtype}, context.architecture(),
                context.forced_implementation());
}
}  // namespace

double sum_of_squares(Context& context, const TensorView& x) { return selected(context, x).sum_of_squares(context, x); }

bool find_non_finite(Context& context, const TensorView& x) { return selected(context, x).find_non_finite(context, x); }

}  // namespace flashgla::ops::global_norm
