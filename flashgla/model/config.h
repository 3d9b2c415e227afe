// ModelConfig: what a config.json says of a model: fields common to all, and those of its layers' mixers (each mixer's
// own list). Reading, writing, printing and validation are derived from the lists.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "flashgla/mixers/config.h"
#include "flashgla/mixers/registry.h"

namespace flashgla::model {

// Layers whose mixer is not the model's own: those of softmax attention in a hybrid, say.
struct OtherLayers {
  std::vector<std::int64_t> layers;
  const mixers::Registration* row;
  mixers::AnyConfig mixer;
};

struct ModelConfig : mixers::Common {
  std::string model_type;  // the registry's row of `mixer`
  std::int64_t hidden_ratio = 4;
  std::optional<std::int64_t> intermediate_size;  // absent: ceil(int(2 hidden ratio/3)/256)*256
  std::string hidden_act = "swish";
  bool use_mlp = true;                 // blocks have an MLP behind the mixer
  bool identity_mlp = false;           // what the MLP's norm gives is added in its place, as in zoology's blocks
  std::string norm_type = "rms_norm";  // of the residual stream: "rms_norm" or "layer_norm"
  bool embedding_norm = false;         // the embeddings are normalised before the first layer
  bool learned_positions = false;      // a vector of each of max_position_embeddings positions joins the embedding
  bool tie_word_embeddings = false;
  std::int64_t vocab_size = 32000;
  std::int64_t bos_token_id = 1;
  std::int64_t eos_token_id = 2;
  std::int64_t max_position_embeddings = 2048;
  mixers::AnyConfig mixer;          // of the layers that no other names
  std::vector<OtherLayers> others;  // each layer in at most one
  std::string layout;               // mixers::Layout::name in which it was read and is written

  // The defaults of the registry's first row, or of that model_type; throws Error that lists the known ones.
  ModelConfig();
  explicit ModelConfig(const std::string& model_type);

  std::int64_t mlp_dim() const;
  const mixers::AnyConfig& mixer_of(std::int64_t layer) const;

  // The least of what its parts can have.
  mixers::MostTokens most_tokens() const;

  // Sets the field of this name, a common one or the mixer's, from JSON text ("4", "true", "\"relu\"", "null").
  // Throws Error when there is none, or it is of another type.
  void set(const std::string& field, const std::string& json);

  // Throws Error that names the field, its value and what it must be.
  void validate() const;
};

// Reads config.json in any layout of any mixer. Unknown keys, wrong types, impossible values and keys that ask for what
// is not implemented are Errors naming file and field; keys that say nothing of what a model computes are passed over
// (foreign_keys.h, mixers::Layout::without_effect), and those that begin with '_'.
ModelConfig load_config(const std::string& path);
ModelConfig parse_config(const std::string& json, const std::string& source);
// In written_layout, or in a layout of the config's mixer; throws Error when that has no place for what the config
// says.
std::string to_json(const ModelConfig& config);
std::string to_json(const ModelConfig& config, const mixers::Layout& layout);
// The layout of the config's mixer with this name; throws Error that lists those there are.
const mixers::Layout& find_layout(const ModelConfig& config, const std::string& name);
// The one in which the config is written: its own, or the mixer's first where its own stores other weights than ours.
const mixers::Layout& written_layout(const ModelConfig& config);

// "gla-340m", "gla-1.3b", ..., of all mixers. Throws Error listing the names.
ModelConfig preset(const std::string& name);
struct Preset {
  std::string name;
  std::string summary;
};
std::vector<Preset> presets();

// Parameters of a model of this shape, by the same visitor that builds it.
std::int64_t parameter_count(const ModelConfig& config);

}  // namespace flashgla::model
