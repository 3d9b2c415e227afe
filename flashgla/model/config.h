// ModelConfig: what a Hugging Face config.json says of a GLA Transformer. One list of fields (visit_fields) from which
// reading, writing, printing and validation are derived.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace flashgla::model {

struct ModelConfig {
  std::string model_type = "gla";  // the mixer's row in the registry
  std::int64_t hidden_size = 2048;
  double expand_k = 0.5;
  double expand_v = 1.0;
  std::int64_t hidden_ratio = 4;
  std::optional<std::int64_t> intermediate_size;  // absent: ceil(int(8 hidden/3)/256)*256 with ratio 4
  std::int64_t num_hidden_layers = 24;
  std::int64_t num_heads = 4;
  std::optional<std::int64_t> num_kv_heads;
  std::optional<std::string> feature_map;
  bool use_short_conv = false;
  std::int64_t conv_size = 4;
  bool use_output_gate = true;
  std::optional<double> clamp_min;
  std::string hidden_act = "swish";
  bool elementwise_affine = true;
  double norm_eps = 1e-6;  // "rms_norm_eps" in older checkpoints
  double gate_logit_normalizer = 16.0;
  std::int64_t gate_low_rank_dim = 16;
  bool tie_word_embeddings = false;
  double initializer_range = 0.02;
  std::int64_t vocab_size = 32000;
  std::int64_t bos_token_id = 1;
  std::int64_t eos_token_id = 2;
  std::int64_t max_position_embeddings = 2048;

  std::int64_t key_dim() const;    // all heads together
  std::int64_t value_dim() const;
  std::int64_t kv_heads() const { return num_kv_heads.value_or(num_heads); }
  std::int64_t mlp_dim() const;

  // Throws Error that names the field, its value and what it must be.
  void validate() const;
};

// Reads config.json; unknown keys are ignored, wrong types and impossible values are Errors naming file and field.
ModelConfig load_config(const std::string& path);
ModelConfig parse_config(const std::string& json, const std::string& source);
std::string to_json(const ModelConfig& config);

// "gla-340m", "gla-1.3b", "gla-2.7b" and small ones ("gla-tiny", "gla-small", ...). Throws Error listing the names.
ModelConfig preset(const std::string& name);
struct Preset { std::string name; std::string summary; };
std::vector<Preset> presets();

// Parameters of a model of this shape, by the same visitor that builds it.
std::int64_t parameter_count(const ModelConfig& config);

}  // namespace flashgla::model
