// The definition, in f64, row after row.
#include <algorithm>
#include <cmath>

#include "flashgla/ops/cross_entropy/implementations.h"
#include "flashgla/ops/elements.h"

namespace flashgla::ops::cross_entropy {

namespace {

void reference_run(Context& context, const Inputs& inputs, const Scores& scores, const Gradients& gradients) {
  const std::int64_t words = inputs.weight.size(0);
  const std::int64_t length = inputs.x.size(1);
  ArenaScope scope(context.scratch());
  const TensorView z_view = context.scratch().tensor({words}, DType::f64, "cross_entropy: logits");
  if (context.planning()) return;
  const Elements x(inputs.x), weight(inputs.weight), losses(scores.losses), hits(scores.hits), dx(gradients.dx),
      dweight(gradients.dweight);
  double* z = z_view.as<double>();
  for (std::int64_t row = 0; row < x.rows(); ++row) {
    const std::int64_t target = inputs.targets.as<std::int32_t>()[row];
    if (target < 0) {
      losses.set(row, 0.0);
      if (scores.hits) hits.set(row, 0.0);
      for (std::int64_t d = 0; gradients.dx && d < length; ++d) dx.set(row, d, 0.0);
      continue;
    }
    parallel_for(context, words, [&](std::int64_t v) {
      z[v] = 0.0;
      for (std::int64_t d = 0; d < length; ++d) z[v] += x(row, d) * weight(v, d);
    });
    const double largest = *std::max_element(z, z + words);
    if (scores.hits) {
      const auto as_large = std::count_if(z, z + words, [&](double other) { return other >= z[target]; });
      hits.set(row, as_large == 1 ? 1.0 : 0.0);
    }
    double total = 0.0;
    for (std::int64_t v = 0; v < words; ++v) total += std::exp(z[v] - largest);
    const double log_total = largest + std::log(total);
    losses.set(row, log_total - z[target]);
    if (!gradients.dx) continue;
    for (std::int64_t v = 0; v < words; ++v) {
      z[v] = gradients.scale * (std::exp(z[v] - log_total) - (v == target ? 1.0 : 0.0));  // now the gradient
    }
    parallel_for(context, length, [&](std::int64_t d) {
      double total_d = 0.0;
      for (std::int64_t v = 0; v < words; ++v) total_d += z[v] * weight(v, d);
      dx.set(row, d, total_d);
      for (std::int64_t v = 0; gradients.dweight && v < words; ++v) dweight.add(v, d, z[v] * x(row, d));
    });
  }
}

}  // namespace

const Implementation kReference{"reference", Device::Kind::cpu,
                                [](const Problem&, const Architecture&) { return Support::yes(); }, reference_run};

}  // namespace flashgla::ops::cross_entropy
