#include "flashgla/ops/sampling/cpu/rows.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "flashgla/base/random.h"

namespace flashgla::ops::sampling {

Row row_of(const TensorView& logits, const TensorView& seen, std::int64_t sequence) {
  return {logits.as<float>() + sequence * logits.stride[0],
          seen ? seen.as<std::uint8_t>() + sequence * seen.stride[0] : nullptr, logits.size(1)};
}

std::int32_t fill_weights(const Row& row, const Options& options, std::vector<std::uint64_t>& weights) {
  weights.resize(static_cast<std::size_t>(row.vocabulary));
  const auto logit = [&](std::int64_t i) {
    return penalized(row.logits[i], row.seen && row.seen[i] != 0, options.repetition_penalty);
  };
  double largest = -std::numeric_limits<double>::infinity();
  std::int64_t first = 0;
  for (std::int64_t i = 0; i < row.vocabulary; ++i) {
    const double l = logit(i);
    if (std::isnan(l)) return kNotANumber;
    if (l > largest) largest = l, first = i;
  }
  if (!std::isfinite(largest)) return kNoneFinite;
  if (options.temperature == 0.0) {
    std::fill(weights.begin(), weights.end(), 0);
    weights[static_cast<std::size_t>(first)] = 1;
    return 0;
  }
  for (std::int64_t i = 0; i < row.vocabulary; ++i) {
    weights[static_cast<std::size_t>(i)] = weight_of((logit(i) - largest) / options.temperature);
  }
  return 0;
}

std::uint64_t mass_wanted(double top_p, std::uint64_t total) {
  return std::min(total, static_cast<std::uint64_t>(std::ceil(top_p * static_cast<double>(total))));
}

std::uint64_t least_of_min_p(double min_p) {
  return static_cast<std::uint64_t>(std::ceil(min_p * static_cast<double>(std::uint64_t{1} << kWeightBits)));
}

void drop_outside(const Cut& cut, std::vector<std::uint64_t>& weights) {
  std::uint64_t equals = 0;
  for (std::uint64_t& weight : weights) {
    if (weight > cut.least || (weight == cut.least && equals++ < cut.equals)) continue;
    weight = 0;
  }
}

void run_rows(Context& context, const TensorView& logits, const TensorView& seen, const TensorView& positions,
              const TensorView& tokens, const Options& options, std::int64_t first_sequence,
              Cut (*cut_of)(const std::vector<std::uint64_t>& weights, const Options& options)) {
  if (context.planning()) return;
  parallel_for(context, logits.size(0), [&](std::int64_t n) {
    static thread_local std::vector<std::uint64_t> weights;
    const Row row = row_of(logits, seen, n);
    std::int32_t& token = tokens.as<std::int32_t>()[n];
    token = fill_weights(row, options, weights);
    if (token != 0) return;
    if (options.temperature > 0.0) drop_outside(cut_of(weights, options), weights);
    const std::uint64_t total = std::accumulate(weights.begin(), weights.end(), std::uint64_t{0});
    const random::Stream stream(options.seed, random::Use::sampling, static_cast<std::uint64_t>(first_sequence + n));
    const std::uint64_t draw = stream.below(static_cast<std::uint32_t>(positions.as<std::int32_t>()[n]), total);
    std::uint64_t reached = 0;
    std::size_t i = 0;
    while ((reached += weights[i]) <= draw) ++i;
    token = static_cast<std::int32_t>(i);
  });
}

void mark_rows(Context& context, const TensorView& tokens, const TensorView& bounds, const TensorView& seen) {
  if (context.planning()) return;
  const auto* ids = tokens.as<std::int32_t>();
  for (std::int64_t n = 0; n < seen.size(0); ++n) {
    const std::int64_t begin = bounds ? bounds.as<std::int32_t>()[n] : n;
    const std::int64_t end = bounds ? bounds.as<std::int32_t>()[n + 1] : n + 1;
    for (std::int64_t i = begin; i < end; ++i) {
      if (ids[i] >= 0 && ids[i] < seen.size(1)) seen.as<std::uint8_t>()[n * seen.size(1) + ids[i]] = 1;
    }
  }
}

}  // namespace flashgla::ops::sampling
