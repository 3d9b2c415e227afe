// What the CPU's implementations share: a row's weights, and the draw once it is known which are kept.
#pragma once

#include <cstdint>
#include <vector>

#include "flashgla/ops/sampling/sampling.h"
#include "flashgla/ops/sampling/weights.h"

namespace flashgla::ops::sampling {

// One sequence's logits and what it has seen (null: nothing).
struct Row {
  const float* logits;
  const std::uint8_t* seen;
  std::int64_t vocabulary;
};
Row row_of(const TensorView& logits, const TensorView& seen, std::int64_t sequence);

// The token of temperature 0, or why there is none (kNotANumber, kNoneFinite).
std::int32_t first_of_largest(const Row& row, double repetition_penalty);

// Weights of all tokens by the options' penalty and temperature, which is not 0. Returns 0, or why none can be drawn.
std::int32_t fill_weights(const Row& row, const Options& options, std::vector<std::uint64_t>& weights);

// Sums that a cut by top_p asks for: of the kept's weights `total`.
std::uint64_t mass_wanted(double top_p, std::uint64_t total);
// The least weight that min_p keeps.
std::uint64_t least_of_min_p(double min_p);

// Sets the weights outside the cut to 0.
void drop_outside(const Cut& cut, std::vector<std::uint64_t>& weights);

// For every sequence: weights, cut, draw; or the largest.
void run_rows(Context& context, const TensorView& logits, const TensorView& seen, const TensorView& positions,
              const TensorView& tokens, const Options& options, std::int64_t first_sequence,
              Cut (*cut_of)(const std::vector<std::uint64_t>& weights, const Options& options));

void mark_rows(Context& context, const TensorView& tokens, const TensorView& bounds, const TensorView& seen);

Cut cut_by_selection(const std::vector<std::uint64_t>& weights, const Options& options);

}  // namespace flashgla::ops::sampling
