// The definition: each element one sum in f64, x as it is.
#include "flashgla/ops/elements.h"
#include "flashgla/ops/quantised_linear/blocks.h"
#include "flashgla/ops/quantised_linear/implementations.h"

namespace flashgla::ops::quantised_linear {

namespace {

void reference_run(Context& context, const TensorView& x_view, const TensorView& weight, const TensorView& y_view,
                   const Options& options) {
  if (context.planning()) return;
  const Blocks w(weight);
  const Elements x(x_view), y(y_view), bias(options.bias);
  parallel_for(context, y_view.size(1), [&](std::int64_t n) {
    for (std::int64_t m = 0; m < y_view.size(0); ++m) {
      double total = options.bias ? bias(n) : 0.0;
      for (std::int64_t k = 0; k < x_view.size(1); ++k) total += x(m, k) * static_cast<double>(w(n, k));
      if (options.accumulate) {
        y.add(m, n, total);
      } else {
        y.set(m, n, total);
      }
    }
  });
}

}  // namespace

const Implementation kReference{"reference", Device::Kind::cpu,
                                [](const Problem& problem, const Architecture&) {
                                  return problem.dtype == DType::bf16 ? Support::no("x is bf16") : Support::yes();
                                },
                                reference_run, [] { return true; }};

}  // namespace flashgla::ops::quantised_linear
