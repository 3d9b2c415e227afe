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

  std::int64_t kv_heads() const { return num_kv_heads.value_or(num_heads); }
  // Query channels of all heads together, and value channels of the outputs of all heads together.
  std::int64_t key_dim(const Common& common) const {
    return static_cast<std::int64_t>(static_cast<double>(common.hidden_size) * expand_k);
  }
  std::int64_t value_dim(const Common& common) const {
    return static_cast<std::int64_t>(static_cast<double>(common.hidden_size) * expand_v);
  }

  std::vector<Field> fields() override;
  void validate(const Common& common) const override;
  std::unique_ptr<Mixer> create(const Common& common, std::int64_t layer) const override;  // layer.cpp
};

}  // namespace flashgla::mixers
