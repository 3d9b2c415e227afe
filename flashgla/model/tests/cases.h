// Small models of every shape that the tests walk.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "flashgla/base/memory.h"
#include "flashgla/model/language_model.h"
#include "testing/compare.h"
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
  plain.intermediate_size = 20;
  plain.vocab_size = 17;
  plain.set("num_heads", "2");
  std::vector<SmallModel> models = {{"plain", plain}};
  const auto add = [&](const char* name, const std::function<void(ModelConfig&)>& change) {
    models.push_back({name, plain});
    change(models.back().config);
  };
  add("grouped_heads", [](ModelConfig& c) { c.hidden_size = 16, c.set("num_heads", "4"), c.set("num_kv_heads", "2"); });
  add("short_convolution", [](ModelConfig& c) { c.set("use_short_conv", "true"); });
  add("no_output_gate", [](ModelConfig& c) { c.set("use_output_gate", "false"); });
  add("output_gate_bias", [](ModelConfig& c) { c.set("output_gate_bias", "true"); });
  add("tied", [](ModelConfig& c) { c.tie_word_embeddings = true; });
  add("no_affine", [](ModelConfig& c) { c.set("elementwise_affine", "false"); });
  add("feature_map", [](ModelConfig& c) { c.set("feature_map", "\"elu_plus_one\""); });
  add("clamped_gate", [](ModelConfig& c) { c.set("clamp_min", "-0.06"); });
  add("everything", [](ModelConfig& c) {
    c.hidden_size = 24, c.set("num_heads", "4"), c.set("num_kv_heads", "2"), c.set("use_short_conv", "true"),
    c.set("conv_size", "3");
    c.tie_word_embeddings = true, c.set("expand_k", "1.0");
  });
  const auto parsed = [&](const char* name, const std::string& fields) {
    models.push_back(
        {name,
         parse_config(R"({"num_hidden_layers": 2, "intermediate_size": 20, "vocab_size": 17, )" + fields + "}", name)});
  };
  parsed("softmax", R"("model_type": "transformer", "hidden_size": 12, "num_heads": 2)");
  parsed("softmax_everything", R"("model_type": "transformer", "hidden_size": 16, "num_heads": 4, "num_kv_heads": 2,
                                  "qkv_bias": true, "qk_norm": true, "window_size": 5, "tie_word_embeddings": true)");
  parsed("hybrid", R"("model_type": "gla", "hidden_size": 12, "num_heads": 2,
                      "attn": {"layers": [1], "num_heads": 3, "num_kv_heads": 1})");
  parsed("hybrid_of_windows", R"("model_type": "transformer", "hidden_size": 12, "num_heads": 2, "window_size": 4,
                                 "layer_mixers": {"layers": [0], "model_type": "gla", "num_heads": 2})");
  parsed("retnet", R"("model_type": "retnet", "hidden_size": 12, "num_heads": 2)");
  parsed("scalar_gate", R"("model_type": "gla_variant", "hidden_size": 12, "num_heads": 2, "gate": "scalar")");
  parsed("linear_attention", R"("model_type": "linear_attn", "hidden_size": 12, "num_heads": 2, "feature_map": "elu",
                                "norm_feature_map": true)");
  parsed("hedgehog", R"("model_type": "linear_attn", "hidden_size": 12, "num_heads": 2, "feature_map": "hedgehog",
                        "norm_feature_map": true, "tie_feature_map_qk": true)");
  parsed("mamba", R"("model_type": "mamba", "hidden_size": 12, "num_hidden_layers": 6, "state_size": 5)");
  parsed("mamba2", R"("model_type": "mamba2", "hidden_size": 12, "num_hidden_layers": 6, "head_dim": 6,
                      "state_size": 5)");
  parsed("mamba2_in_a_hybrid", R"("model_type": "gla", "hidden_size": 12, "num_hidden_layers": 6, "num_heads": 2,
      "layer_mixers": {"layers": [1], "model_type": "mamba2", "head_dim": 6, "state_size": 5, "n_groups": 2})");
  parsed("hgrn2", R"("model_type": "hgrn2", "hidden_size": 12, "num_hidden_layers": 3, "expand_ratio": 6)");
  parsed("gsa", R"("model_type": "gsa", "hidden_size": 12, "num_hidden_layers": 3, "num_heads": 2, "num_slots": 5)");
  parsed("rwkv", R"("model_type": "rwkv", "hidden_size": 12, "num_hidden_layers": 6)");
  parsed("rwkv_in_a_hybrid", R"("model_type": "rwkv", "hidden_size": 12, "intermediate_size": null,
      "num_hidden_layers": 3, "tie_word_embeddings": true, "zero_init": false,
      "layer_mixers": {"layers": [1], "model_type": "gla", "num_heads": 2})");
  parsed(
      "rwkv_of_zoology",
      R"("model_type": "rwkv", "hidden_size": 12, "identity_mlp": true, "embedding_norm": false, "num_hidden_layers": 6,
                               "zero_init": false)");
  parsed("hyena", R"("model_type": "hyena", "hidden_size": 12, "num_hidden_layers": 3, "l_max": 80,
                     "filter_order": 5)");
  parsed("layer_norm", R"("model_type": "transformer", "hidden_size": 12, "num_heads": 2, "norm_type": "layer_norm",
                          "learned_positions": true, "max_position_embeddings": 300, "use_rope": false,
                          "o_bias": true, "identity_mlp": true)");
  parsed("learned_positions", R"("model_type": "linear_attn", "hidden_size": 12, "num_heads": 2, "feature_map": "elu",
                                 "learned_positions": true, "norm_type": "layer_norm")");
  parsed("no_mlp", R"("model_type": "gla", "hidden_size": 12, "num_heads": 2, "use_mlp": false)");
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

// Tokens that the tests' states have room for.
constexpr std::int64_t kCapacity = 64;

inline void fill_state(const DecodeState& state, std::uint64_t seed, double deviation) {
  for (std::size_t layer = 0; layer < state.layer_count(); ++layer) {
    for (const TensorView& entry : state.layer(layer)) testing::fill_normal(entry, seed++, deviation);
  }
  for (std::int64_t n = 0; n < state.sequences(); ++n) {
    state.positions().as<std::int32_t>()[n] = static_cast<std::int32_t>(6 + n);  // tokens before
  }
}

inline void copy_state(const DecodeState& from, const DecodeState& to) {
  for (std::size_t layer = 0; layer < from.layer_count(); ++layer) {
    for (std::size_t i = 0; i < from.layer(layer).size(); ++i) copy(from.layer(layer)[i], to.layer(layer)[i]);
  }
  for (std::int64_t n = 0; n < from.sequences(); ++n) {
    to.positions().as<std::int32_t>()[n] = from.positions().as<std::int32_t>()[n];
  }
}

// "" when they agree, growing entries in the rows that are filled, or what does not; relative 0: the same bits.
inline std::string compare_states(const DecodeState& state, const DecodeState& reference, double relative) {
  std::string failures;
  for (std::int64_t n = 0; n < state.sequences(); ++n) {
    const std::int32_t filled = state.positions().as<std::int32_t>()[n];
    if (filled != reference.positions().as<std::int32_t>()[n]) failures += "positions differ\n";
    for (std::size_t layer = 0; layer < state.layer_count(); ++layer) {
      for (std::size_t i = 0; i < state.layer(layer).size(); ++i) {
        TensorView own = state.layer(layer)[i].select(0, n), other = reference.layer(layer)[i].select(0, n);
        if (state.layout(layer)[i].growing) own = own.slice(0, 0, filled), other = other.slice(0, 0, filled);
        if (relative > 0.0) {
          failures += testing::check_close(state.layout(layer)[i].name.c_str(), own, other, relative);
        } else if (!testing::same_bits(own, other)) {
          failures += state.layout(layer)[i].name + " differs\n";
        }
      }
    }
  }
  return failures;
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
