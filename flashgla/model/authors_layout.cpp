#include "flashgla/model/authors_layout.h"

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "flashgla/base/memory.h"

namespace flashgla::model {

namespace {

using nlohmann::json;

// The authors' name of a tensor of ours.
std::string authors_name(const std::string& name) {
  static const std::map<std::string, std::string> whole = {{"model.embeddings.weight", "transformer.wte.weight"},
                                                           {"model.norm.weight", "transformer.ln_f.weight"},
                                                           {"lm_head.weight", "lm_head.weight"}};
  static const std::map<std::string, std::string> in_layer = {{"attn_norm.weight", "ln_1.weight"},
                                                              {"attn.q_proj.weight", "attn.q_proj.weight"},
                                                              {"attn.k_proj.weight", "attn.k_proj.weight"},
                                                              {"attn.v_proj.weight", "attn.v_proj.weight"},
                                                              {"attn.gk_proj.0.weight", "attn.k_gate.0.weight"},
                                                              {"attn.gk_proj.1.weight", "attn.k_gate.1.weight"},
                                                              {"attn.gk_proj.1.bias", "attn.k_gate.1.bias"},
                                                              {"attn.g_proj.weight", "attn.g_proj.weight"},
                                                              {"attn.g_proj.bias", "attn.g_proj.bias"},
                                                              {"attn.o_proj.weight", "attn.out_proj.weight"},
                                                              {"mlp_norm.weight", "ln_2.weight"},
                                                              {"mlp.gate_proj.weight", "w1.weight"},
                                                              {"mlp.up_proj.weight", "w3.weight"},
                                                              {"mlp.down_proj.weight", "w2.weight"}};
  if (const auto row = whole.find(name); row != whole.end()) return row->second;
  constexpr std::string_view kLayers = "model.layers.";
  const std::size_t dot = name.find('.', kLayers.size());
  return "transformer.h." + name.substr(kLayers.size(), dot - kLayers.size()) + "." + in_layer.at(name.substr(dot + 1));
}

// Subtracts from each head's rows of W_v [heads * V, D] their mean.
void center_heads(const TensorView& weight, std::int64_t heads) {
  const std::int64_t rows = weight.size(0) / heads;
  const std::int64_t columns = weight.size(1);
  auto* values = weight.as<float>();
  for (std::int64_t head = 0; head < heads; ++head) {
    float* first = values + head * rows * columns;
    for (std::int64_t column = 0; column < columns; ++column) {
      double mean = 0.0;
      for (std::int64_t row = 0; row < rows; ++row) mean += static_cast<double>(first[row * columns + column]);
      mean /= static_cast<double>(rows);
      for (std::int64_t row = 0; row < rows; ++row) first[row * columns + column] -= static_cast<float>(mean);
    }
  }
}

void scale(const TensorView& weight, double factor) {
  auto* values = weight.as<float>();
  for (std::int64_t i = 0; i < weight.numel(); ++i)
    values[i] = static_cast<float>(factor * static_cast<double>(values[i]));
}

}  // namespace

bool is_authors_config(const std::string& text) {
  const json object = json::parse(text, nullptr, false);
  return object.is_object() && object.contains("d_model") && object.contains("n_layer");
}

ModelConfig parse_authors_config(const std::string& text, const std::string& source) {
  const json object = json::parse(text, nullptr, false);
  if (!object.is_object()) throw Error(source + ": not a JSON object");
  const auto integer = [&](const char* field, std::int64_t otherwise) {
    if (!object.contains(field)) return otherwise;
    if (!object[field].is_number_integer()) throw Error(source, field, "is " + object[field].dump(), "an integer");
    return object[field].get<std::int64_t>();
  };
  const auto flag = [&](const char* field, bool otherwise) {
    if (!object.contains(field)) return otherwise;
    if (!object[field].is_boolean()) throw Error(source, field, "is " + object[field].dump(), "true or false");
    return object[field].get<bool>();
  };
  if (!flag("use_gk", true)) throw Error(source, "use_gk", "is false", "true");
  if (flag("use_gv", false)) throw Error(source, "use_gv", "is true", "false");
  ModelConfig config;
  config.hidden_size = integer("d_model", 2048);
  config.num_heads = integer("n_head", 8);
  config.num_hidden_layers = integer("n_layer", 24);
  config.vocab_size = integer("vocab_size", 50432);
  config.max_position_embeddings = integer("context_length", 2048);
  config.bos_token_id = integer("bos_token_id", 0);
  config.eos_token_id = integer("eos_token_id", 0);
  config.tie_word_embeddings = flag("tie_word_embeddings", false);
  config.norm_eps = 1e-5;
  config.elementwise_affine = false;
  config.output_gate_bias = true;
  try {
    config.validate();
  } catch (const Error& error) {
    throw Error(source + ": " + error.what());
  }
  return config;
}

void load_authors_weights(const Weights& weights, LanguageModel& model) {
  std::map<std::string, Tensor> tensors;  // by the authors' names, in f32
  for (const nn::Parameter* parameter : model.parameters().parameters()) {
    const std::string name = authors_name(parameter->name);
    const StoredTensor* stored = weights.find(name);
    if (stored == nullptr) throw Error("the weights have no tensor '" + name + "' " + to_string(parameter->shape));
    if (stored->shape_text() != to_string(parameter->shape)) {
      throw Error("tensor '" + name + "' has shape " + stored->shape_text() + ", but by the config it is " +
                  to_string(parameter->shape));
    }
    tensors.emplace(name, Tensor::empty(parameter->shape, DType::f32));
  }
  for (const SafetensorsReader& file : weights.files) {
    file.read([&](const StoredTensor& stored) {
      const auto row = tensors.find(stored.name);
      if (row != tensors.end()) return row->second.view();
      if (stored.name == "lm_head.weight" && model.config().tie_word_embeddings) return TensorView();
      throw Error(file.path() + ": tensor '" + stored.name + "' " + stored.shape_text() +
                  " has no place in the model that the config describes");
    });
  }
  const auto heads = static_cast<double>(model.config().num_heads);
  const double theirs = std::sqrt(heads / static_cast<double>(model.config().hidden_size));
  const double ours = std::sqrt(heads / static_cast<double>(model.config().key_dim()));
  for (const nn::Parameter* parameter : model.parameters().parameters()) {
    const TensorView source = tensors.at(authors_name(parameter->name));
    if (parameter->name.ends_with(".attn.k_proj.weight")) scale(source, theirs / ours);
    if (parameter->name.ends_with(".attn.v_proj.weight")) center_heads(source, model.config().num_heads);
    const Tensor converted = Tensor::empty(source.shape, parameter->value.dtype);
    copy(source, converted);
    copy_memory(parameter->value.data, parameter->value.device, converted->data, Device::cpu(), converted->bytes());
  }
}

}  // namespace flashgla::model
