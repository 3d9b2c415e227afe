// GlaConfig: the fields of a GLA layer, as in flash-linear-attention's config.json.
#pragma once

#include "flashgla/mixers/config.h"

namespace flashgla::mixers {

struct GlaConfig : ConfigOf<GlaConfig> {
  std::int64_t num_heads = 4;
  std::optional<std::int64_t> num_kv_heads;  // absent: num_heads
  double expand_k = 0.5;
  double expand_v = 1.0;
  std::optional<std::string> feature_map;
  bool use_short_conv = false;
  std::int64_t conv_size = 4;
  bool use_output_gate = true;
  bool output_gate_bias = false;    // only in models of the paper's authors, not in flash-linear-attention's
  std::optional<double> clamp_min;  // of the log gate
  double gate_logit_normalizer = 16.0;
  std::int64_t gate_low_rank_dim = 16;
  bool elementwise_affine = true;  // the norm of the heads' outputs has a weight
  // "key", or of the paper's ablations (which GlaVariantConfig alone lists): "value", "key_value" (its first version),
  // "scalar", "constant", "none".
  std::string gate = "key";

  std::int64_t kv_heads() const { return num_kv_heads.value_or(num_heads); }

  std::vector<Field> fields() override;
  void validate(const Common& common) const override;
  std::unique_ptr<Mixer> create(const Common& common, std::int64_t layer) const override;
};

// The same layer with another gate (Table 2 of the paper), which no other library's config can say.
struct GlaVariantConfig : GlaConfig {
  std::unique_ptr<Config> clone() const override { return std::make_unique<GlaVariantConfig>(*this); }
  std::vector<Field> fields() override;
};

}  // namespace flashgla::mixers
