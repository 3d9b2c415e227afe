// The definitions, in f64.
#include <algorithm>
#include <cmath>

#include "flashgla/ops/elements.h"
#include "flashgla/ops/elementwise/implementations.h"

namespace flashgla::ops::elementwise {

namespace {

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// out[row,d] = f(row, d) for every element.
template <class F>
void write_each(Context& context, const TensorView& out_view, const F& f) {
  const Elements out(out_view);
  parallel_for(context, out.rows(), [&](std::int64_t row) {
    for (std::int64_t d = 0; d < out.length(); ++d) out.set(row, d, f(row, d));
  });
}

void reference_add_to(Context& context, const TensorView& a_view, const TensorView& b_view, const TensorView& out) {
  const Elements a(a_view), b(b_view);
  write_each(context, out, [&](std::int64_t row, std::int64_t d) { return a(row, d) + b(row, d); });
}

void reference_multiply(Context& context, const TensorView& a_view, const TensorView& b_view, const TensorView& out) {
  const Elements a(a_view), b(b_view);
  write_each(context, out, [&](std::int64_t row, std::int64_t d) { return a(row, d) * b(row, d); });
}

void reference_scale(Context& context, const TensorView& x_view, double factor) {
  const Elements x(x_view);
  write_each(context, x_view, [&](std::int64_t row, std::int64_t d) { return x(row, d) * factor; });
}

void reference_convert(Context& context, const TensorView& src_view, const TensorView& dst) {
  const Elements src(src_view);
  write_each(context, dst, [&](std::int64_t row, std::int64_t d) { return src(row, d); });
}

void reference_column_sum(Context& context, const TensorView& dy_view, const TensorView& db_view, bool accumulate) {
  if (context.planning()) return;
  const Elements dy(dy_view), db(db_view);
  parallel_for(context, db.length(), [&](std::int64_t n) {
    double total = accumulate ? db(n) : 0.0;
    for (std::int64_t row = 0; row < dy.rows(); ++row) total += dy(row, n);
    db.set(n, total);
  });
}

void reference_silu_forward(Context& context, const TensorView& x_view, const TensorView& y) {
  const Elements x(x_view);
  write_each(context, y, [&](std::int64_t row, std::int64_t d) { return x(row, d) * sigmoid(x(row, d)); });
}

void reference_silu_backward(Context& context, const TensorView& x_view, const TensorView& dy_view,
                             const TensorView& dx) {
  const Elements x(x_view), dy(dy_view);
  write_each(context, dx, [&](std::int64_t row, std::int64_t d) {
    const double value = x(row, d), s = sigmoid(value);
    return dy(row, d) * (s + value * s * (1.0 - s));
  });
}

void reference_squared_relu_forward(Context& context, const TensorView& x_view, const TensorView& y) {
  const Elements x(x_view);
  write_each(context, y, [&](std::int64_t row, std::int64_t d) {
    const double value = std::max(x(row, d), 0.0);
    return value * value;
  });
}

void reference_squared_relu_backward(Context& context, const TensorView& x_view, const TensorView& dy_view,
                                     const TensorView& dx) {
  const Elements x(x_view), dy(dy_view);
  write_each(context, dx,
             [&](std::int64_t row, std::int64_t d) { return 2.0 * std::max(x(row, d), 0.0) * dy(row, d); });
}

void reference_sigmoid_gate_forward(Context& context, const TensorView& gate_view, const TensorView& x_view,
                                    const TensorView& y) {
  const Elements gate(gate_view), x(x_view);
  write_each(context, y, [&](std::int64_t row, std::int64_t d) { return sigmoid(gate(row, d)) * x(row, d); });
}

void reference_sigmoid_gate_backward(Context& context, const TensorView& gate_view, const TensorView& x_view,
                                     const TensorView& dy_view, const TensorView& dgate_view, const TensorView& dx) {
  const Elements gate(gate_view), x(x_view), dy(dy_view), dgate(dgate_view);
  write_each(context, dx, [&](std::int64_t row, std::int64_t d) {
    const double s = sigmoid(gate(row, d)), gradient = dy(row, d);
    dgate.set(row, d, gradient * x(row, d) * s * (1.0 - s));
    return gradient * s;
  });
}

}  // namespace

const Implementation kReference{"reference",
                                Device::Kind::cpu,
                                [](const Problem&, const Architecture&) { return Support::yes(); },
                                reference_add_to,
                                reference_scale,
                                reference_convert,
                                reference_column_sum,
                                reference_silu_forward,
                                reference_silu_backward,
                                reference_squared_relu_forward,
                                reference_squared_relu_backward,
                                reference_sigmoid_gate_forward,
                                reference_sigmoid_gate_backward,
                                reference_multiply};

}  // namespace flashgla::ops::elementwise
