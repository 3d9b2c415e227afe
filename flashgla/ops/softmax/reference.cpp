// The definition, in f64.
#include <algorithm>
#include <cmath>

#include "flashgla/ops/elements.h"
#include "flashgla/ops/softmax/implementations.h"

namespace flashgla::ops::softmax {

namespace {

void reference_forward(Context& context, const TensorView& x_view, const TensorView& y_view) {
  const Elements x(x_view), y(y_view);
  parallel_for(context, x.rows(), [&](std::int64_t row) {
    double largest = x(row, 0), total = 0.0;
    for (std::int64_t d = 1; d < x.length(); ++d) largest = std::max(largest, x(row, d));
    for (std::int64_t d = 0; d < x.length(); ++d) total += std::exp(x(row, d) - largest);
    for (std::int64_t d = 0; d < x.length(); ++d) y.set(row, d, std::exp(x(row, d) - largest) / total);
  });
}

void reference_backward(Context& context, const TensorView& y_view, const TensorView& dy_view,
                        const TensorView& dx_view) {
  const Elements y(y_view), dy(dy_view), dx(dx_view);
  parallel_for(context, y.rows(), [&](std::int64_t row) {
    double dot = 0.0;
    for (std::int64_t d = 0; d < y.length(); ++d) dot += dy(row, d) * y(row, d);
    for (std::int64_t d = 0; d < y.length(); ++d) dx.set(row, d, y(row, d) * (dy(row, d) - dot));
  });
}

}  // namespace

const Implementation kReference{"reference", Device::Kind::cpu,
                                [](const Problem&, const Architecture&) { return Support::yes(); }, reference_forward,
                                reference_backward};

}  // namespace flashgla::ops::softmax
