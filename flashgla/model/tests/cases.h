// Small models of every shape that the tests walk.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "flashgla/base/memory.h"
#include "flashgla/model/language_model.h"
#include "testing/random.h"

namespace flashgla::model {

struct SmallModel {
  std::string name;
  ModelConfig config;
};

inline std::vector<SmallModel> small_models() {
  ModelConfig plain;
  plain.hidden_size = 12;
  plain.num_hidden_layers = 2;
  plain.num_heads = 2;
  plain.intermediate_size = 20;
  plain.vocab_size = 17;
  std::vector<SmallModel> models = {{"plain", plain}};
  const auto add = [&](const char* name, const std::function<void(ModelConfig&)>& change) {
    models.push_back({name, plain});
    change(models.back().config);
  };
  add("grouped_heads", [](ModelConfig& c) { c.hidden_size = 16, c.num_heads = 4, c.num_kv_heads = 2; });
  add("short_convolution", [](ModelConfig& c) { c.use_short_conv = true; });
  add("no_output_gate", [](ModelConfig& c) { c.use_output_gate = false; });
  add("output_gate_bias", [](ModelConfig& c) { c.output_gate_bias = true; });
  add("tied", [](ModelConfig& c) { c.tie_word_embeddings = true; });
  add("no_affine", [](ModelConfig& c) { c.elementwise_affine = false; });
  add("feature_map", [](ModelConfig& c) { c.feature_map = "elu_plus_one"; });
  add("clamped_gate", [](ModelConfig& c) { c.clamp_min = -0.06; });
  add("everything", [](ModelConfig& c) {
    c.hidden_size = 24, c.num_heads = 4, c.num_kv_heads = 2, c.use_short_conv = true, c.conv_size = 3;
    c.tie_word_embeddings = true, c.expand_k = 1.0;
  });
  return models;
}

// Parameters random and large enough that every part of the model matters.
inline std::unique_ptr<LanguageModel> make_small(const ModelConfig& config, DType dtype, bool training) {
  auto model = std::make_unique<LanguageModel>(config, dtype, Device::cpu(), training);
  std::uint64_t seed = 1;
  for (const nn::Parameter* parameter : model->parameters().parameters()) {
    const bool ones = parameter->initialization == nn::Initialization::ones;
    testing::fill_normal(parameter->value, seed++, ones ? 0.1 : 0.3, ones ? 1.0 : 0.0);
  }
  return model;
}

// i32 [B,T] in [0, vocabulary).
inline Tensor random_tokens(const Shape& shape, std::int64_t vocabulary, std::uint64_t seed) {
  Tensor tokens = Tensor::empty(shape, DType::i32);
  for (std::int64_t i = 0; i < shape.numel(); ++i) {
    tokens.as<std::int32_t>()[i] = static_cast<std::int32_t>(testing::uniform(seed, static_cast<std::uint64_t>(i)) *
                                                             static_cast<double>(vocabulary));
  }
  return tokens;
}

inline Tensor int_tensor(const std::vector<std::int32_t>& values) {
  Tensor tensor = Tensor::empty(Shape({static_cast<std::int64_t>(values.size())}), DType::i32);
  for (std::size_t i = 0; i < values.size(); ++i) tensor.as<std::int32_t>()[i] = values[i];
  return tensor;
}

}  // namespace flashgla::model
