// MixerConfig: what of a model's configuration its token mixers read. model::ModelConfig adds the rest.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace flashgla::mixers {

struct MixerConfig {
  std::int64_t hidden_size = 2048;
  std::int64_t num_hidden_layers = 24;
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
  double norm_eps = 1e-6;          // "rms_norm_eps" in older checkpoints
  double initializer_range = 0.02;

  std::int64_t kv_heads() const { return num_kv_heads.value_or(num_heads); }
  // Query channels of all heads together, and value channels of the outputs of all heads together.
  std::int64_t key_dim() const { return static_cast<std::int64_t>(static_cast<double>(hidden_size) * expand_k); }
  std::int64_t value_dim() const { return static_cast<std::int64_t>(static_cast<double>(hidden_size) * expand_v); }
};

}  // namespace flashgla::mixers
