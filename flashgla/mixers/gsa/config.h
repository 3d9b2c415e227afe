// GSA's configuration, with its fields' names in flash-linear-attention.
#pragma once

#include "flashgla/mixers/config.h"

namespace flashgla::mixers {

struct GsaConfig : ConfigOf<GsaConfig> {
  std::int64_t num_heads = 4;
  std::optional<std::int64_t> num_kv_heads;  // absent: num_heads
  std::int64_t num_slots = 64;
  double expand_k = 1.0;
  bool use_short_conv = false;
  std::int64_t conv_size = 4;
  double gate_logit_normalizer = 8.0;

  std::vector<Field> fields() override;
  void validate(const Common& common) const override;
  std::unique_ptr<Mixer> create(const Common& common, std::int64_t layer) const override;  // layer.cpp

  std::int64_t kv_heads() const { return num_kv_heads.value_or(num_heads); }
};

}  // namespace flashgla::mixers
