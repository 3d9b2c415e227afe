// SoftmaxAttentionConfig: the fields of an attention layer, as in flash-linear-attention's config.json.
#pragma once

#include "flashgla/mixers/config.h"

namespace flashgla::mixers {

struct SoftmaxAttentionConfig : ConfigOf<SoftmaxAttentionConfig> {
  std::int64_t num_heads = 32;
  std::optional<std::int64_t> num_kv_heads;  // absent: num_heads
  std::optional<std::int64_t> head_dim;      // absent: hidden_size / num_heads
  bool qkv_bias = false;
  bool o_bias = false;  // not in flash-linear-attention's models
  bool qk_norm = false;
  std::optional<std::int64_t> window_size;  // tokens that a token sees, itself included; absent: all before it
  bool use_rope = true;                     // rotary positions; not in flash-linear-attention, whose models have them
  double rope_theta = 10000.0;

  std::int64_t kv_heads() const { return num_kv_heads.value_or(num_heads); }
  std::int64_t head_channels(const Common& common) const { return head_dim.value_or(common.hidden_size / num_heads); }

  std::vector<Field> fields() override;
  void validate(const Common& common) const override;
  std::unique_ptr<Mixer> create(const Common& common, std::int64_t layer) const override;  // layer.cpp
};

}  // namespace flashgla::mixers
