#include "flashgla/model/config.h"

#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <type_traits>

#include "flashgla/base/error.h"
#include "flashgla/model/language_model.h"

namespace flashgla::model {

namespace {

using nlohmann::ordered_json;

// The one list of fields: reading, writing and the defaults of presets follow from it.
template <class Config, class Visit>
void visit_fields(Config& config, Visit&& visit) {
  visit("model_type", config.model_type);
  visit("hidden_size", config.hidden_size);
  visit("expand_k", config.expand_k);
  visit("expand_v", config.expand_v);
  visit("hidden_ratio", config.hidden_ratio);
  visit("intermediate_size", config.intermediate_size);
  visit("num_hidden_layers", config.num_hidden_layers);
  visit("num_heads", config.num_heads);
  visit("num_kv_heads", config.num_kv_heads);
  visit("feature_map", config.feature_map);
  visit("use_short_conv", config.use_short_conv);
  visit("conv_size", config.conv_size);
  visit("use_output_gate", config.use_output_gate);
  visit("output_gate_bias", config.output_gate_bias);
  visit("clamp_min", config.clamp_min);
  visit("hidden_act", config.hidden_act);
  visit("elementwise_affine", config.elementwise_affine);
  visit("norm_eps", config.norm_eps);
  visit("gate_logit_normalizer", config.gate_logit_normalizer);
  visit("gate_low_rank_dim", config.gate_low_rank_dim);
  visit("tie_word_embeddings", config.tie_word_embeddings);
  visit("initializer_range", config.initializer_range);
  visit("vocab_size", config.vocab_size);
  visit("bos_token_id", config.bos_token_id);
  visit("eos_token_id", config.eos_token_id);
  visit("max_position_embeddings", config.max_position_embeddings);
}

template <class T>
struct IsOptional : std::false_type {};
template <class T>
struct IsOptional<std::optional<T>> : std::true_type {};

[[noreturn]] void refuse(const std::string& source, const char* field, const ordered_json& value,
                         const std::string& expected) {
  throw Error(source, field, "is " + value.dump(-1, ' ', false, ordered_json::error_handler_t::replace), expected);
}

template <class T>
void read_field(const std::string& source, const char* field, const ordered_json& value, T& out) {
  if constexpr (IsOptional<T>::value) {
    if (value.is_null()) {
      out.reset();
    } else {
      read_field(source, field, value, out.emplace());
    }
  } else if constexpr (std::is_same_v<T, bool>) {
    if (!value.is_boolean()) refuse(source, field, value, "true or false");
    out = value.get<bool>();
  } else if constexpr (std::is_same_v<T, std::int64_t>) {
    if (!value.is_number_integer() ||
        (value.is_number_unsigned() &&
         value.get<std::uint64_t>() > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))) {
      refuse(source, field, value, "an integer");
    }
    out = value.get<std::int64_t>();
  } else if constexpr (std::is_same_v<T, double>) {
    if (!value.is_number()) refuse(source, field, value, "a number");
    out = value.get<double>();
  } else {
    if (!value.is_string()) refuse(source, field, value, "a string");
    out = value.get<std::string>();
  }
}

// Keys that change what the model computes in a way that is not implemented: ignoring them would be silently wrong.
void refuse_unsupported(const std::string& source, const ordered_json& object) {
  if (object.contains("attn") && !object["attn"].is_null()) {
    refuse(source, "attn", object["attn"], "null (hybrids with softmax attention are not supported)");
  }
  if (object.contains("use_gk") && object["use_gk"] != true) refuse(source, "use_gk", object["use_gk"], "true");
  if (object.contains("use_gv") && object["use_gv"] != false) refuse(source, "use_gv", object["use_gv"], "false");
}

ModelConfig shape(std::int64_t hidden, std::int64_t layers, std::int64_t heads, bool tied) {
  ModelConfig config;
  config.hidden_size = hidden;
  config.num_hidden_layers = layers;
  config.num_heads = heads;
  config.tie_word_embeddings = tied;
  return config;
}

// Byte-level: 256 bytes, <s> and </s>.
ModelConfig byte_level(std::int64_t hidden, std::int64_t layers, std::int64_t heads, std::int64_t intermediate) {
  ModelConfig config = shape(hidden, layers, heads, true);
  config.intermediate_size = intermediate;
  config.use_short_conv = true;
  config.vocab_size = 258;
  config.bos_token_id = 256;
  config.eos_token_id = 257;
  return config;
}

struct PresetRow {
  const char* name;
  const char* summary;
  ModelConfig (*make)();
};

constexpr PresetRow kPresets[] = {
    {"gla-tiny", "0.8M parameters, byte level: minutes on two cores",
     [] {
       ModelConfig config = byte_level(128, 4, 2, 320);
       config.initializer_range = 0.05;  // ahead of 0.02 at this width: train/README.md
       return config;
     }},
    {"gla-small", "7M parameters, byte level: an evening on two cores", [] { return byte_level(256, 8, 4, 768); }},
    {"gla-medium", "25M parameters, 8192 words",
     [] {
       ModelConfig config = shape(384, 12, 4, true);
       config.vocab_size = 8192;
       return config;
     }},
    {"gla-340m", "the paper's 340M model, tied embeddings", [] { return shape(1024, 24, 4, true); }},
    {"gla-1.3b", "the paper's 1.3B model", [] { return shape(2048, 24, 4, false); }},
    {"gla-2.7b", "the 2.7B model of flash-linear-attention", [] { return shape(2560, 32, 5, false); }},
};

}  // namespace

std::int64_t ModelConfig::mlp_dim() const {
  if (intermediate_size) return *intermediate_size;
  const auto width = static_cast<std::int64_t>(static_cast<double>(hidden_size * hidden_ratio) * 2.0 / 3.0);
  return (width + 255) / 256 * 256;
}

void ModelConfig::validate() const {
  const auto require = [](bool ok, const char* field, const std::string& actual, const std::string& expected) {
    if (!ok) throw Error("config", field, "is " + actual, expected);
  };
  const auto positive = [&](const char* field, std::int64_t value, std::int64_t largest) {
    require(value > 0 && value <= largest, field, std::to_string(value), "1 to " + std::to_string(largest));
  };
  constexpr std::int64_t kLargest = 1 << 20;  // keeps every product of two sizes far from overflow
  positive("hidden_size", hidden_size, kLargest);
  positive("num_hidden_layers", num_hidden_layers, 4096);
  positive("num_heads", num_heads, hidden_size);
  if (num_kv_heads) positive("num_kv_heads", *num_kv_heads, num_heads);
  positive("hidden_ratio", hidden_ratio, 1024);
  if (intermediate_size) positive("intermediate_size", *intermediate_size, 64 * kLargest);
  positive("vocab_size", vocab_size, 64 * kLargest);
  positive("conv_size", conv_size, 4);
  positive("gate_low_rank_dim", gate_low_rank_dim, kLargest);
  const auto ratio = [&](const char* field, double value) {
    require(value > 0.0 && value <= 64.0, field, std::to_string(value), "more than 0 and at most 64");
  };
  ratio("expand_k", expand_k);
  ratio("expand_v", expand_v);
  require(norm_eps > 0.0 && norm_eps < 1.0, "norm_eps", std::to_string(norm_eps), "between 0 and 1");
  require(std::isfinite(initializer_range) && initializer_range > 0.0, "initializer_range",
          std::to_string(initializer_range), "a positive number");
  require(std::isfinite(gate_logit_normalizer) && gate_logit_normalizer > 0.0, "gate_logit_normalizer",
          std::to_string(gate_logit_normalizer), "a positive number");
  require(!clamp_min || *clamp_min <= 0.0, "clamp_min", std::to_string(clamp_min.value_or(0.0)), "at most 0");
  require(hidden_act == "swish" || hidden_act == "silu", "hidden_act", "'" + hidden_act + "'", "'swish' or 'silu'");
  require(bos_token_id >= 0 && bos_token_id < vocab_size, "bos_token_id", std::to_string(bos_token_id),
          "0 to vocab_size - 1");
  require(eos_token_id >= 0 && eos_token_id < vocab_size, "eos_token_id", std::to_string(eos_token_id),
          "0 to vocab_size - 1");
  mixers::find_mixer(model_type).create(*this, 0);  // its own demands
}

ModelConfig parse_config(const std::string& json, const std::string& source) {
  ordered_json object;
  try {
    object = ordered_json::parse(json);
  } catch (const nlohmann::json::exception& error) {
    throw Error(source + ": not JSON (" + error.what() + ")");
  }
  if (!object.is_object()) throw Error(source + ": not a JSON object");
  refuse_unsupported(source, object);
  ModelConfig config;
  if (object.contains("rms_norm_eps")) read_field(source, "rms_norm_eps", object["rms_norm_eps"], config.norm_eps);
  visit_fields(config, [&](const char* field, auto& value) {
    if (object.contains(field)) read_field(source, field, object[field], value);
  });
  try {
    config.validate();
  } catch (const Error& error) {
    throw Error(source + ": " + error.what());
  }
  return config;
}

ModelConfig load_config(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw Error(path + ": cannot be read; a model folder has config.json and model.safetensors");
  std::ostringstream text;
  text << file.rdbuf();
  return parse_config(text.str(), path);
}

std::string to_json(const ModelConfig& config) {
  ordered_json object;
  object["architectures"] = {"GLAForCausalLM"};
  visit_fields(config, [&](const char* field, const auto& value) {
    if constexpr (IsOptional<std::decay_t<decltype(value)>>::value) {
      object[field] = value ? ordered_json(*value) : ordered_json(nullptr);
    } else {
      object[field] = value;
    }
  });
  return object.dump(2) + "\n";
}

ModelConfig preset(const std::string& name) {
  std::string known;
  for (const PresetRow& row : kPresets) {
    if (name == row.name) return row.make();
    known += (known.empty() ? "" : ", ") + std::string(row.name);
  }
  throw Error("preset: unknown '" + name + "'; known: " + known);
}

std::vector<Preset> presets() {
  std::vector<Preset> all;
  for (const PresetRow& row : kPresets) all.push_back({row.name, row.summary});
  return all;
}

}  // namespace flashgla::model
