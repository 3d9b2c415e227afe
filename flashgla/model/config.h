// ModelConfig: what a Hugging Face config.json says of a GLA Transformer. One list of fields (visit_fields) from which
// reading, writing, printing and validation are derived.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "flashgla/mixers/config.h"

namespace flashgla::model {

struct ModelConfig : mixers::MixerConfig {
  std::string model_type = "gla";  // the mixer's row in the registry
  std::int64_t hidden_ratio = 4;
  std::optional<std::int64_t> intermediate_size;  // absent: ceil(int(2 hidden ratio/3)/256)*256
  std::string hidden_act = "swish";
  bool tie_word_embeddings = false;
  std::int64_t vocab_size = 32000;
  std::int64_t bos_token_id = 1;
  std::int64_t eos_token_id = 2;
  std::int64_t max_position_embeddings = 2048;

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
struct Preset {
  std::string name;
  std::string summary;
};
std::vector<Preset> presets();

// Parameters of a model of this shape, by the same visitor that builds it.
std::int64_t parameter_count(const ModelConfig& config);

}  // namespace flashgla::model
