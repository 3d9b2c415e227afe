// The definition, in f64.
#include <cmath>

#include "flashgla/ops/elements.h"
#include "flashgla/ops/rms_norm/implementations.h"

namespace flashgla::ops::rms_norm {

namespace {

void reference_forward(Context& context, const Inputs& inputs, const Outputs& outputs, double epsilon) {
  if (context.planning()) return;
  const Elements x(inputs.x), weight(inputs.weight);
  const Elements y(outputs.y), rstd(outputs.rstd);
  const std::int64_t length = x.length();
  parallel_for(context, x.rows(), [&](std::int64_t row) {
    double squares = 0.0;
    for (std::int64_t d = 0; d < length; ++d) squares += x(row, d) * x(row, d);
    const double r = 1.0 / std::sqrt(squares / static_cast<double>(length) + epsilon);
    for (std::int64_t d = 0; d < length; ++d) y.set(row, d, x(row, d) * r * (inputs.weight ? weight(d) : 1.0));
    if (outputs.rstd) rstd.set(row, r);
  });
}

void reference_backward(Context& context, const TensorView& x_view, const TensorView& weight_view,
                        const TensorView& rstd_view, const TensorView& dy_view, const TensorView& dx_view,
                        bool accumulate_dx, const TensorView& dweight_view) {
  if (context.planning()) return;
  const Elements x(x_view), weight(weight_view), rstd(rstd_view), dy(dy_view), dx(dx_view), dweight(dweight_view);
  const std::int64_t length = x.length();
  auto u = [&](std::int64_t row, std::int64_t d) { return dy(row, d) * (weight_view ? weight(d) : 1.0); };
  if (dweight_view) {  // before dx, which may take dy's place
    parallel_for(context, length, [&](std::int64_t d) {
      double total = 0.0;
      for (std::int64_t row = 0; row < x.rows(); ++row) total += dy(row, d) * x(row, d) * rstd(row);
      dweight.add(d, total);
    });
  }
  parallel_for(context, x.rows(), [&](std::int64_t row) {
    const double r = rstd(row);
    double mean = 0.0;
    for (std::int64_t d = 0; d < length; ++d) mean += u(row, d) * x(row, d) / static_cast<double>(length);
    for (std::int64_t d = 0; d < length; ++d) {
      const double gradient = r * (u(row, d) - x(row, d) * r * r * mean);
      dx.set(row, d, accumulate_dx ? dx(row, d) + gradient : gradient);
    }
  });
}

}  // namespace

const Implementation kReference{"reference", Device::Kind::cpu,
                                [](const Problem&, const Architecture&) { return Support::yes(); }, reference_forward,
                                reference_backward};

}  // namespace flashgla::ops::rms_norm
