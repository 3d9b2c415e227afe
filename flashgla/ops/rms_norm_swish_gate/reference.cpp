// The definition, in f64.
#include <cmath>

#include "flashgla/ops/elements.h"
#include "flashgla/ops/rms_norm_swish_gate/implementations.h"

namespace flashgla::ops::rms_norm_swish_gate {

namespace {

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

void reference_forward(Context& context, const TensorView& x_view, const TensorView& gate_view,
                       const TensorView& weight_view, const TensorView& y_view, const TensorView& rstd_view,
                       double epsilon) {
  if (context.planning()) return;
  const Elements x(x_view), gate(gate_view), weight(weight_view), y(y_view), rstd(rstd_view);
  const std::int64_t length = x.length();
  parallel_for(context, x.rows(), [&](std::int64_t row) {
    double squares = 0.0;
    for (std::int64_t d = 0; d < length; ++d) squares += x(row, d) * x(row, d);
    const double r = 1.0 / std::sqrt(squares / static_cast<double>(length) + epsilon);
    for (std::int64_t d = 0; d < length; ++d) {
      const double z = gate(row, d);
      y.set(row, d, x(row, d) * r * (weight_view ? weight(d) : 1.0) * z * sigmoid(z));
    }
    if (rstd_view) rstd.set(row, r);
  });
}

void reference_backward(Context& context, const TensorView& x_view, const TensorView& gate_view,
                        const TensorView& weight_view, const TensorView& rstd_view, const TensorView& dy_view,
                        const TensorView& dx_view, const TensorView& dgate_view, const TensorView& dweight_view) {
  if (context.planning()) return;
  const Elements x(x_view), gate(gate_view), weight(weight_view), rstd(rstd_view), dy(dy_view);
  const Elements dx(dx_view), dgate(dgate_view), dweight(dweight_view);
  const std::int64_t length = x.length();
  auto swish = [&](std::int64_t row, std::int64_t d) { return gate(row, d) * sigmoid(gate(row, d)); };
  auto weight_of = [&](std::int64_t d) { return weight_view ? weight(d) : 1.0; };
  if (dweight_view) {  // before dx and dgate, which may take the place of dy and gate
    parallel_for(context, length, [&](std::int64_t d) {
      double total = 0.0;
      for (std::int64_t row = 0; row < x.rows(); ++row) total += dy(row, d) * swish(row, d) * x(row, d) * rstd(row);
      dweight.add(d, total);
    });
  }
  parallel_for(context, x.rows(), [&](std::int64_t row) {
    const double r = rstd(row);
    double mean = 0.0;  // of u_e x_e, u = dy swish weight
    for (std::int64_t d = 0; d < length; ++d) {
      mean += dy(row, d) * swish(row, d) * weight_of(d) * x(row, d) / static_cast<double>(length);
    }
    for (std::int64_t d = 0; d < length; ++d) {
      const double value = x(row, d), z = gate(row, d), s = sigmoid(z), gradient = dy(row, d);
      dx.set(row, d, r * (gradient * z * s * weight_of(d) - value * r * r * mean));
      dgate.set(row, d, gradient * value * r * weight_of(d) * (s + z * s * (1.0 - s)));
    }
  });
}

}  // namespace

const Implementation kReference{"reference", Device::Kind::cpu,
                                [](const Problem&, const Architecture&) { return Support::yes(); }, reference_forward,
                                reference_backward};

}  // namespace flashgla::ops::rms_norm_swish_gate
