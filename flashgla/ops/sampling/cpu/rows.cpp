#include "flashgla/ops/sampling/cpu/rows.h"

#include <algorithm>
#include <bit>
#include <cmath>
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
  for (std::int64_t i = 0; i < row.vocabulary; ++i) {
    const double l = logit(i);
    if (std::isnan(l)) return kNotANumber;
    largest = std::max(largest, l);
  }
  if (!std::isfinite(largest)) return kNoneFinite;
  for (std::int64_t i = 0; i < row.vocabulary; ++i) {
    weights[static_cast<std::size_t>(i)] = weight_of((logit(i) - largest) / options.temperature);
  }
  return 0;
}

std::int32_t first_of_largest(const Row& row, double repetition_penalty) {
  if (row.seen == nullptr || repetition_penalty == 1.0) {
    // In the order of their bits as integers, so that the compiler has many in a vector.
    std::int32_t most = std::numeric_limits<std::int32_t>::min(), magnitude = 0;
    for (std::int64_t i = 0; i < row.vocabulary; ++i) {
      const auto bits = std::bit_cast<std::int32_t>(row.logits[i]);
      const std::int32_t size = bits & std::numeric_limits<std::int32_t>::max();
      magnitude = std::max(magnitude, size);
      most = std::max(most, bits < 0 ? -size : size);
    }
    constexpr auto kInfinite = std::bit_cast<std::int32_t>(std::numeric_limits<float>::infinity());
    if (magnitude > kInfinite) return kNotANumber;
    if (most == kInfinite || most == -kInfinite) return kNoneFinite;
    const auto largest = std::bit_cast<float>(most < 0 ? -most | std::numeric_limits<std::int32_t>::min() : most);
    return static_cast<std::int32_t>(std::find(row.logits, row.logits + row.vocabulary, largest) - row.logits);
  }
  double largest = -std::numeric_limits<double>::infinity();
  std::int64_t first = 0;
  for (std::int64_t i = 0; i < row.vocabulary; ++i) {
    const double l = penalized(row.logits[i], row.seen[i] != 0, repetition_penalty);
    if (std::isnan(l)) return kNotANumber;
    if (l > largest) largest = l, first = i;
  }
  return std::isfinite(largest) ? static_cast<std::int32_t>(first) : kNoneFinite;
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
    if (options.temperature == 0.0) {
      token = first_of_largest(row, options.repetition_penalty);
      return;
    }
    token = fill_weights(row, options, weights);
    if (token != 0) return;
    drop_outside(cut_of(weights, options), weights);
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
