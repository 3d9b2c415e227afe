// The definition, in f64.
#include "flashgla/ops/dropout/implementations.h"
#include "flashgla/ops/dropout/mask.h"
#include "flashgla/ops/elements.h"

namespace flashgla::ops::dropout {

namespace {

void reference_run(Context& context, const TensorView& x_view, const TensorView& residual_view,
                   const TensorView& out_view, const Mask& mask) {
  const Elements x(x_view), residual(residual_view ? residual_view : x_view), out(out_view);
  const Rule rule(mask);
  const random::Stream stream = rule.stream();
  parallel_for(context, out.rows(), [&](std::int64_t row) {
    for (std::int64_t d = 0; d < out.length(); ++d) {
      const std::int64_t element = row * out.length() + d;
      const random::Words words = stream.words(static_cast<std::uint64_t>(element / kElementsPerDraw));
      const double factor = rule.factor_of(words, static_cast<int>(element % kElementsPerDraw));
      out.set(row, d, (residual_view ? residual(row, d) : 0.0) + (factor == 0.0 ? 0.0 : factor * x(row, d)));
    }
  });
}

}  // namespace

const Implementation kReference{"reference", Device::Kind::cpu,
                                [](const Problem&, const Architecture&) { return Support::yes(); }, reference_run};

}  // namespace flashgla::ops::dropout
