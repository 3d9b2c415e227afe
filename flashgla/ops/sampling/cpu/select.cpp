// The cut by partial sorting of the weights alone: the largest come first, as far as they are asked for.
#include <algorithm>
#include <functional>
#include <numeric>

#include "flashgla/ops/sampling/cpu/rows.h"
#include "flashgla/ops/sampling/implementations.h"

namespace flashgla::ops::sampling {

Cut cut_by_selection(const std::vector<std::uint64_t>& weights, const Options& options) {
  const bool by_rank = options.top_k > 0 && options.top_k < static_cast<std::int64_t>(weights.size());
  const bool by_mass = options.top_p < 1.0;
  Cut cut;
  if (by_rank || by_mass) {
    static thread_local std::vector<std::uint64_t> sorted;
    sorted = weights;
    std::size_t kept = by_rank ? static_cast<std::size_t>(options.top_k) : sorted.size();
    if (by_rank) {
      std::nth_element(sorted.begin(), sorted.begin() + static_cast<std::ptrdiff_t>(kept) - 1, sorted.end(),
                       std::greater<>());
    }
    if (by_mass) {
      const auto end = sorted.begin() + static_cast<std::ptrdiff_t>(kept);
      const std::uint64_t wanted = mass_wanted(options.top_p, std::accumulate(sorted.begin(), end, std::uint64_t{0}));
      // A model is mostly sure of a few: sort so many, and twice as many when they do not reach.
      std::uint64_t mass = 0;
      std::size_t count = 0, ready = 0;
      while (mass < wanted) {
        if (count == ready) {
          const std::size_t next = std::min(kept, std::max<std::size_t>(64, 2 * ready));
          std::partial_sort(sorted.begin() + static_cast<std::ptrdiff_t>(ready),
                            sorted.begin() + static_cast<std::ptrdiff_t>(next), end, std::greater<>());
          ready = next;
        }
        mass += sorted[count++];
      }
      kept = count;
    }
    const auto end = sorted.begin() + static_cast<std::ptrdiff_t>(kept);
    cut.least = *std::min_element(sorted.begin(), end);
    cut.equals = static_cast<std::uint64_t>(std::count(sorted.begin(), end, cut.least));
  }
  if (const std::uint64_t least = least_of_min_p(options.min_p); least > cut.least) {
    cut = {least, weights.size()};
  }
  return cut;
}

namespace {

void run_select(Context& context, const TensorView& logits, const TensorView& seen, const TensorView& positions,
                const TensorView& tokens, const Options& options, std::int64_t first_sequence) {
  run_rows(context, logits, seen, positions, tokens, options, first_sequence, cut_by_selection);
}

}  // namespace

bool distribution(const TensorView& logits, const TensorView& seen, const TensorView& weights, const Options& options) {
  options.validate();
  std::vector<std::uint64_t> values;
  const Row row{logits.as<float>(), seen ? seen.as<std::uint8_t>() : nullptr, logits.numel()};
  if (options.temperature == 0.0) {
    const std::int32_t first = first_of_largest(row, options.repetition_penalty);
    if (first < 0) return false;
    values.resize(static_cast<std::size_t>(row.vocabulary));
    values[static_cast<std::size_t>(first)] = 1;
  } else {
    if (fill_weights(row, options, values) != 0) return false;
    drop_outside(cut_by_selection(values, options), values);
  }
  std::copy(values.begin(), values.end(), weights.as<std::int64_t>());
  return true;
}

const Implementation kSelect{"select", Device::Kind::cpu,
                             [](const Problem&, const Architecture&) { return Support::yes(); }, run_select, mark_rows};

}  // namespace flashgla::ops::sampling
