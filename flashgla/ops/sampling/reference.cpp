// The definition: everything sorted by weight, then by token.
#include <algorithm>
#include <numeric>

#include "flashgla/ops/sampling/cpu/rows.h"
#include "flashgla/ops/sampling/implementations.h"

namespace flashgla::ops::sampling {

namespace {

Cut cut_by_sorting(const std::vector<std::uint64_t>& weights, const Options& options) {
  std::vector<std::size_t> order(weights.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return weights[a] > weights[b]; });
  if (options.top_k > 0) order.resize(std::min(order.size(), static_cast<std::size_t>(options.top_k)));
  if (options.top_p < 1.0) {
    std::uint64_t sum = 0;
    for (const std::size_t i : order) sum += weights[i];
    const std::uint64_t wanted = mass_wanted(options.top_p, sum);
    while (order.size() > 1 && sum - weights[order.back()] >= wanted) {
      sum -= weights[order.back()];
      order.pop_back();
    }
  }
  const std::uint64_t least = least_of_min_p(options.min_p);
  while (order.size() > 1 && weights[order.back()] < least) order.pop_back();
  Cut cut;
  cut.least = weights[order.back()];
  for (const std::size_t i : order) cut.equals += weights[i] == cut.least ? 1 : 0;
  return cut;
}

void reference(Context& context, const TensorView& logits, const TensorView& seen, const TensorView& positions,
               const TensorView& tokens, const Options& options, std::int64_t first_sequence) {
  run_rows(context, logits, seen, positions, tokens, options, first_sequence, cut_by_sorting);
}

}  // namespace

const Implementation kReference{"reference", Device::Kind::cpu,
                                [](const Problem&, const Architecture&) { return Support::yes(); }, reference,
                                mark_rows};

}  // namespace flashgla::ops::sampling
