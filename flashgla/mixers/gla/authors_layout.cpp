#include "flashgla/mixers/gla/authors_layout.h"

#include <cmath>

#include "flashgla/base/error.h"
#include "flashgla/mixers/gated_layer.h"
#include "flashgla/mixers/gla/config.h"

namespace flashgla::mixers {

namespace {

constexpr const char *kKeys = ".attn.k_proj.weight", *kValues = ".attn.v_proj.weight";

// Their scale of keys, over ours: (D / heads)^-1/2 over K^-1/2.
double key_factor(const Common& common, const GlaConfig& gla) {
  return std::sqrt(static_cast<double>(expanded(common, gla.expand_k)) / static_cast<double>(common.hidden_size));
}

// Calls f(values, mean) for each column of each head's rows of W_v [heads * V, D]: the values' pointers are D apart.
template <class F>
void for_each_head_column(const TensorView& weight, std::int64_t heads, F f) {
  const std::int64_t rows = weight.size(0) / heads, columns = weight.size(1);
  for (std::int64_t at = 0; at < heads * columns; ++at) {
    float* first = weight.as<float>() + at / columns * rows * columns + at % columns;
    double mean = 0.0;
    for (std::int64_t row = 0; row < rows; ++row) mean += static_cast<double>(first[row * columns]);
    f(first, mean / static_cast<double>(rows));
  }
}

void center_heads(const TensorView& weight, std::int64_t heads) {
  const std::int64_t rows = weight.size(0) / heads, columns = weight.size(1);
  for_each_head_column(weight, heads, [&](float* first, double mean) {
    for (std::int64_t row = 0; row < rows; ++row) first[row * columns] -= static_cast<float>(mean);
  });
}

void require_centred(const TensorView& weight, std::int64_t heads, const std::string& name) {
  constexpr double kRounding = 1.0 / 2048;  // of means to values: what bf16 leaves of means of 0, and some more
  double means = 0.0, values = 0.0;
  for_each_head_column(weight, heads, [&](const float*, double mean) { means += mean * mean; });
  for (std::int64_t i = 0; i < weight.numel(); ++i) {
    values += std::pow(static_cast<double>(weight.as<float>()[i]), 2.0);
  }
  means *= static_cast<double>(weight.size(0)) / static_cast<double>(heads);  // as many as values
  if (means <= kRounding * kRounding * values) return;
  throw Error("layout authors: has no place for " + name + ", whose means over a head's rows are not 0 (" +
              std::to_string(std::sqrt(means / values)) + " of its values): the norm there takes them away");
}

void scale(const TensorView& weight, double factor) {
  auto* values = weight.as<float>();
  for (std::int64_t i = 0; i < weight.numel(); ++i) {
    values[i] = static_cast<float>(factor * static_cast<double>(values[i]));
  }
}

}  // namespace

void convert_from_authors(const Common& common, const Config& config, const std::string& name,
                          const TensorView& value) {
  const auto& gla = static_cast<const GlaConfig&>(config);
  if (name.ends_with(kKeys)) scale(value, key_factor(common, gla));
  if (name.ends_with(kValues)) center_heads(value, gla.num_heads);
}

void convert_to_authors(const Common& common, const Config& config, const std::string& name, const TensorView& value) {
  const auto& gla = static_cast<const GlaConfig&>(config);
  if (name.ends_with(kKeys)) scale(value, 1.0 / key_factor(common, gla));
  if (name.ends_with(kValues)) require_centred(value, gla.num_heads, name);
}

}  // namespace flashgla::mixers
