// The definition, in f64.
#include <cmath>

#include "flashgla/ops/elements.h"
#include "flashgla/ops/layer_norm/implementations.h"

namespace flashgla::ops::layer_norm {

namespace {

void reference_forward(Context& context, const Inputs& inputs, const Outputs& outputs, double epsilon) {
  if (context.planning()) return;
  const Elements x(inputs.x), weight(inputs.weight), bias(inputs.bias), y(outputs.y), mean(outputs.mean),
      rstd(outputs.rstd);
  const std::int64_t length = x.length();
  parallel_for(context, x.rows(), [&](std::int64_t row) {
    double m = 0.0, squares = 0.0;
    for (std::int64_t d = 0; d < length; ++d) m += x(row, d) / static_cast<double>(length);
    for (std::int64_t d = 0; d < length; ++d) squares += (x(row, d) - m) * (x(row, d) - m);
    const double r = 1.0 / std::sqrt(squares / static_cast<double>(length) + epsilon);
    for (std::int64_t d = 0; d < length; ++d) y.set(row, d, (x(row, d) - m) * r * weight(d) + bias(d));
    if (!outputs.rstd) return;
    mean.set(row, m);
    rstd.set(row, r);
  });
}

void reference_backward(Context& context, const Gradients& g) {
  if (context.planning()) return;
  const Elements x(g.x), weight(g.weight), mean(g.mean), rstd(g.rstd), dy(g.dy), dx(g.dx), dweight(g.dweight);
  const std::int64_t length = x.length();
  const auto u = [&](std::int64_t row, std::int64_t d) { return dy(row, d) * weight(d); };
  const auto n = [&](std::int64_t row, std::int64_t d) { return (x(row, d) - mean(row)) * rstd(row); };
  parallel_for(context, length, [&](std::int64_t d) {  // before dx, which may take dy's place
    double total = 0.0;
    for (std::int64_t row = 0; row < x.rows(); ++row) total += dy(row, d) * n(row, d);
    dweight.add(d, total);
  });
  parallel_for(context, x.rows(), [&](std::int64_t row) {
    double mean_u = 0.0, mean_un = 0.0;
    for (std::int64_t d = 0; d < length; ++d) {
      mean_u += u(row, d) / static_cast<double>(length);
      mean_un += u(row, d) * n(row, d) / static_cast<double>(length);
    }
    for (std::int64_t d = 0; d < length; ++d) {
      const double gradient = rstd(row) * (u(row, d) - mean_u - n(row, d) * mean_un);
      dx.set(row, d, g.accumulate_dx ? dx(row, d) + gradient : gradient);
    }
  });
}

}  // namespace

const Implementation kReference{"reference", Device::Kind::cpu,
                                [](const Problem&, const Architecture&) { return Support::yes(); }, reference_forward,
                                reference_backward};

}  // namespace flashgla::ops::layer_norm
