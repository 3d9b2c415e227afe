// The definition, in f64.
#include "flashgla/ops/elements.h"
#include "flashgla/ops/embedding/implementations.h"

namespace flashgla::ops::embedding {

namespace {

void reference_forward(Context& context, const TensorView& tokens, const TensorView& table_view,
                       const TensorView& y_view, const TensorView&) {
  if (context.planning()) return;
  const Elements table(table_view), y(y_view);
  parallel_for(context, y.rows(), [&](std::int64_t row) {
    const std::int32_t token = tokens.as<std::int32_t>()[row];
    for (std::int64_t d = 0; d < y.length(); ++d) y.set(row, d, table(token, d));
  });
}

void reference_backward(Context& context, const TensorView& tokens, const TensorView& dy_view,
                        const TensorView& dtable_view, const TensorView&) {
  if (context.planning()) return;
  const Elements dy(dy_view), dtable(dtable_view);
  parallel_for(context, dy.length(), [&](std::int64_t d) {
    for (std::int64_t row = 0; row < dy.rows(); ++row) dtable.add(tokens.as<std::int32_t>()[row], d, dy(row, d));
  });
}

}  // namespace

const Implementation kReference{"reference", Device::Kind::cpu,
                                [](const Problem&, const Architecture&) { return Support::yes(); }, reference_forward,
                                reference_backward};

}  // namespace flashgla::ops::embedding
