// The definition, in f64.
#include <cmath>

#include "flashgla/ops/elements.h"
#include "flashgla/ops/swiglu/implementations.h"

namespace flashgla::ops::swiglu {

namespace {

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

void reference_forward(Context& context, const TensorView& gate, const TensorView& up, const TensorView& y) {
  const Elements g(gate), u(up), out(y);
  parallel_for(context, g.rows(), [&](std::int64_t r) {
    for (std::int64_t d = 0; d < g.length(); ++d) out.set(r, d, g(r, d) * sigmoid(g(r, d)) * u(r, d));
  });
}

void reference_backward(Context& context, const TensorView& gate, const TensorView& up, const TensorView& dy,
                        const TensorView& dgate, const TensorView& dup, const TensorView& y) {
  const Elements g(gate), u(up), out_gradient(dy), gate_gradient(dgate), up_gradient(dup), out(y);
  parallel_for(context, g.rows(), [&](std::int64_t r) {
    for (std::int64_t d = 0; d < g.length(); ++d) {
      const double x = g(r, d), s = sigmoid(x), other = u(r, d), gradient = out_gradient(r, d);
      gate_gradient.set(r, d, gradient * other * (s + x * s * (1.0 - s)));
      up_gradient.set(r, d, gradient * x * s);
      if (y) out.set(r, d, x * s * other);
    }
  });
}

}  // namespace

const Implementation kReference{"reference", Device::Kind::cpu,
                                [](const Problem&, const Architecture&) { return Support::yes(); }, reference_forward,
                                reference_backward};

}  // namespace flashgla::ops::swiglu
