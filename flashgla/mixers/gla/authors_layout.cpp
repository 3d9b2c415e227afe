#include "flashgla/mixers/gla/authors_layout.h"

#include <cmath>

#include "flashgla/mixers/gated_layer.h"
#include "flashgla/mixers/gla/config.h"

namespace flashgla::mixers {

namespace {

// Subtracts from each head's rows of W_v [heads * V, D] their mean.
void center_heads(const TensorView& weight, std::int64_t heads) {
  const std::int64_t rows = weight.size(0) / heads;
  const std::int64_t columns = weight.size(1);
  auto* values = weight.as<float>();
  for (std::int64_t head = 0; head < heads; ++head) {
    float* first = values + head * rows * columns;
    for (std::int64_t column = 0; column < columns; ++column) {
      double mean = 0.0;
      for (std::int64_t row = 0; row < rows; ++row) mean += static_cast<double>(first[row * columns + column]);
      mean /= static_cast<double>(rows);
      for (std::int64_t row = 0; row < rows; ++row) first[row * columns + column] -= static_cast<float>(mean);
    }
  }
}

void scale(const TensorView& weight, double factor) {
  auto* values = weight.as<float>();
  for (std::int64_t i = 0; i < weight.numel(); ++i) {
    values[i] = static_cast<float>(factor * static_cast<double>(values[i]));
  }
}

}  // namespace

void convert_from_authors(const Common& common, Config& config, const std::string& name, const TensorView& value) {
  const auto& gla = static_cast<const GlaConfig&>(config);
  const auto heads = static_cast<double>(gla.num_heads);
  const double theirs = std::sqrt(heads / static_cast<double>(common.hidden_size));
  const double ours = std::sqrt(heads / static_cast<double>(expanded(common, gla.expand_k)));
  if (name.ends_with(".attn.k_proj.weight")) scale(value, theirs / ours);
  if (name.ends_with(".attn.v_proj.weight")) center_heads(value, gla.num_heads);
}

}  // namespace flashgla::mixers
