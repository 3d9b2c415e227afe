// The definition, in f64.
#include <algorithm>
#include <cmath>

#include "flashgla/ops/elements.h"
#include "flashgla/ops/log_sigmoid_gate/implementations.h"

namespace flashgla::ops::log_sigmoid_gate {

namespace {

// min(x, 0) - log(1 + exp(-|x|)): exact where either branch of sigmoid would round to 0 or 1.
double log_sigmoid(double x) { return std::min(x, 0.0) - std::log1p(std::exp(-std::abs(x))); }

void reference_forward(Context& context, const TensorView& x, const TensorView& g, double normalizer,
                       double clamp_min) {
  const Elements in(x), out(g);
  parallel_for(context, in.rows(), [&](std::int64_t r) {
    for (std::int64_t d = 0; d < in.length(); ++d) {
      out.set(r, d, std::max(log_sigmoid(in(r, d)) / normalizer, clamp_min));
    }
  });
}

void reference_backward(Context& context, const TensorView& x, const TensorView& dg, const TensorView& dx,
                        double normalizer, double clamp_min) {
  const Elements in(x), gate_gradient(dg), in_gradient(dx);
  parallel_for(context, in.rows(), [&](std::int64_t r) {
    for (std::int64_t d = 0; d < in.length(); ++d) {
      const double value = in(r, d);
      const double slope = log_sigmoid(value) / normalizer >= clamp_min ? 1.0 / (1.0 + std::exp(value)) : 0.0;
      in_gradient.set(r, d, gate_gradient(r, d) * slope / normalizer);
    }
  });
}

}  // namespace

const Implementation kReference{"reference", Device::Kind::cpu,
                                [](const Problem&, const Architecture&) { return Support::yes(); }, reference_forward,
                                reference_backward};

}  // namespace flashgla::ops::log_sigmoid_gate
