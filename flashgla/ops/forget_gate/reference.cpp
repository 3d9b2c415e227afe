// The definition, in f64. With u = e^-|x| the gate before its normalizer is (1 + b u) / (1 + u), or (b + u) / (1 + u)
// where x is negative: no digits are lost where sigmoid is near 0 or 1.
#include <cmath>

#include "flashgla/ops/elements.h"
#include "flashgla/ops/forget_gate/implementations.h"

namespace flashgla::ops::forget_gate {

namespace {

double log_gate(double x, double b) {
  const double u = std::exp(-std::abs(x));
  if (b == 0.0) return std::min(x, 0.0) - std::log1p(u);
  return -std::log1p((1.0 - b) * (x >= 0.0 ? u / (1.0 + b * u) : 1.0 / (b + u)));
}

void reference_forward(Context& context, const TensorView& x_view, const TensorView& bound_view,
                       const TensorView& g_view, const TensorView& k_view, double normalizer) {
  const Elements x(x_view), bound(bound_view), g(g_view), k(k_view);
  parallel_for(context, x.rows(), [&](std::int64_t row) {
    for (std::int64_t d = 0; d < x.length(); ++d) {
      const double gate = log_gate(x(row, d), bound_view ? bound(row, d) : 0.0) / normalizer;
      g.set(row, d, gate);
      k.set(row, d, -std::expm1(gate));
    }
  });
}

void reference_backward(Context& context, const TensorView& x_view, const TensorView& bound_view,
                        const TensorView& dg_view, const TensorView& dk_view, const TensorView& dx_view,
                        const TensorView& dbound_view, double normalizer) {
  const Elements x(x_view), bound(bound_view), dg(dg_view), dk(dk_view), dx(dx_view), dbound(dbound_view);
  parallel_for(context, x.rows(), [&](std::int64_t row) {
    for (std::int64_t d = 0; d < x.length(); ++d) {
      const double b = bound_view ? bound(row, d) : 0.0, value = x(row, d), u = std::exp(-std::abs(value));
      const double gate = log_gate(value, b) / normalizer;
      const double of_gate = (dg(row, d) - std::exp(gate) * dk(row, d)) / normalizer;
      const double open = (value >= 0.0 ? u : 1.0) / (1.0 + u);  // 1 - sigmoid(x)
      const double share = b == 0.0 ? 1.0 : (1.0 - b) * (value >= 0.0 ? 1.0 / (1.0 + b * u) : u / (b + u));
      dx.set(row, d, of_gate * open * share);
      if (bound_view) dbound.set(row, d, of_gate * (value >= 0.0 ? u / (1.0 + b * u) : 1.0 / (b + u)));
    }
  });
}

}  // namespace

const Implementation kReference{"reference", Device::Kind::cpu,
                                [](const Problem&, const Architecture&) { return Support::yes(); }, reference_forward,
                                reference_backward};

}  // namespace flashgla::ops::forget_gate
