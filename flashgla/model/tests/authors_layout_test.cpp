#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "flashgla/base/file.h"
#include "flashgla/base/json.h"
#include "flashgla/model/checkpoint.h"
#include "flashgla/model/tests/cases.h"
#include "testing/compare.h"
#include "testing/conformance.h"
#include "testing/temporary_folder.h"

namespace flashgla::model {
namespace {

constexpr std::int64_t kHidden = 8, kHeads = 2, kLayers = 2, kWords = 11, kMlp = 256;
constexpr const char* kConfig = R"({"model_type": "transformer", "d_model": 8, "n_head": 2, "n_layer": 2,
  "vocab_size": 11, "context_length": 64, "use_gk": true, "use_gv": false})";

using Row = std::vector<double>;

// A model in the authors' layout, and its forward pass token by token as their code defines it.
struct AuthorsModel {
  std::map<std::string, Tensor> tensors;

  AuthorsModel() {
    add("transformer.wte.weight", Shape({kWords, kHidden}));
    for (std::int64_t layer = 0; layer < kLayers; ++layer) {
      const std::string h = "transformer.h." + std::to_string(layer) + ".";
      add(h + "ln_1.weight", Shape({kHidden}));
      add(h + "ln_2.weight", Shape({kHidden}));
      add(h + "attn.q_proj.weight", Shape({kHidden / 2, kHidden}));
      add(h + "attn.k_proj.weight", Shape({kHidden / 2, kHidden}));
      add(h + "attn.k_gate.0.weight", Shape({16, kHidden}));
      add(h + "attn.k_gate.1.weight", Shape({kHidden / 2, 16}));
      add(h + "attn.k_gate.1.bias", Shape({kHidden / 2}));
      add(h + "attn.v_proj.weight", Shape({kHidden, kHidden}));
      add(h + "attn.g_proj.weight", Shape({kHidden, kHidden}));
      add(h + "attn.g_proj.bias", Shape({kHidden}));
      add(h + "attn.out_proj.weight", Shape({kHidden, kHidden}));
      add(h + "w1.weight", Shape({kMlp, kHidden}));
      add(h + "w3.weight", Shape({kMlp, kHidden}));
      add(h + "w2.weight", Shape({kHidden, kMlp}));
    }
    add("transformer.ln_f.weight", Shape({kHidden}));
    add("lm_head.weight", Shape({kWords, kHidden}));
  }
  void add(const std::string& name, const Shape& shape) {
    tensors.emplace(name, testing::random_normal(shape, DType::f32, tensors.size() + 1, 0.6));
  }
  std::vector<NamedTensor> named() const {
    std::vector<NamedTensor> rows;
    for (const auto& [name, tensor] : tensors) rows.push_back({name, tensor});
    return rows;
  }

  Row linear(const std::string& name, const Row& x) const {
    const Tensor& weight = tensors.at(name + ".weight");
    Row y(static_cast<std::size_t>(weight->size(0)));
    for (std::size_t i = 0; i < y.size(); ++i) {
      for (std::size_t j = 0; j < x.size(); ++j)
        y[i] += static_cast<double>(weight.as<float>()[i * x.size() + j]) * x[j];
      if (tensors.contains(name + ".bias")) y[i] += static_cast<double>(tensors.at(name + ".bias").as<float>()[i]);
    }
    return y;
  }
  Row rms_norm(const std::string& name, const Row& x) const {
    double squares = 0.0;
    for (const double value : x) squares += value * value;
    Row y = x;
    for (std::size_t i = 0; i < x.size(); ++i) {
      y[i] *= static_cast<double>(tensors.at(name + ".weight").as<float>()[i]) /
              std::sqrt(squares / static_cast<double>(x.size()) + 1e-5);
    }
    return y;
  }

  // Logits after each token.
  std::vector<Row> forward(const std::vector<std::int32_t>& tokens) const {
    constexpr std::size_t kKey = kHidden / 2 / kHeads, kValue = kHidden / kHeads;
    std::vector<std::vector<double>> states(kLayers, std::vector<double>(kHeads * kKey * kValue));
    std::vector<Row> all;
    for (const std::int32_t token : tokens) {
      const float* embedding = tensors.at("transformer.wte.weight").as<float>() + token * kHidden;
      Row x(embedding, embedding + kHidden);
      for (std::size_t layer = 0; layer < kLayers; ++layer) {
        const std::string h = "transformer.h." + std::to_string(layer) + ".";
        const Row in = rms_norm(h + "ln_1", x);
        const Row q = linear(h + "attn.q_proj", in), k = linear(h + "attn.k_proj", in),
                  v = linear(h + "attn.v_proj", in);
        const Row gate = linear(h + "attn.k_gate.1", linear(h + "attn.k_gate.0", in));
        const Row swish = linear(h + "attn.g_proj", in);
        Row o(kHidden);
        for (std::size_t head = 0; head < kHeads; ++head) {
          double mean = 0.0;
          for (std::size_t j = 0; j < kValue; ++j) {
            for (std::size_t i = 0; i < kKey; ++i) {
              double& state = states[layer][(head * kKey + i) * kValue + j];
              const std::size_t channel = head * kKey + i;
              const double alpha = std::pow(1.0 / (1.0 + std::exp(-gate[channel])), 1.0 / 16.0);
              state =
                  alpha * state + k[channel] / std::sqrt(static_cast<double>(kHidden) / kHeads) * v[head * kValue + j];
              o[head * kValue + j] += q[channel] * state;
            }
            mean += o[head * kValue + j] / kValue;
          }
          double variance = 0.0;
          for (std::size_t j = 0; j < kValue; ++j) variance += std::pow(o[head * kValue + j] - mean, 2.0) / kValue;
          for (std::size_t j = 0; j < kValue; ++j) {
            const std::size_t channel = head * kValue + j;
            o[channel] =
                (o[channel] - mean) / std::sqrt(variance + 1e-5) * swish[channel] / (1.0 + std::exp(-swish[channel]));
          }
        }
        const Row mixed = linear(h + "attn.out_proj", o);
        for (std::size_t i = 0; i < x.size(); ++i) x[i] += mixed[i];
        const Row in2 = rms_norm(h + "ln_2", x);
        Row hidden = linear(h + "w1", in2);
        const Row up = linear(h + "w3", in2);
        for (std::size_t i = 0; i < hidden.size(); ++i) hidden[i] *= up[i] / (1.0 + std::exp(-hidden[i]));
        const Row down = linear(h + "w2", hidden);
        for (std::size_t i = 0; i < x.size(); ++i) x[i] += down[i];
      }
      all.push_back(linear("lm_head", rms_norm("transformer.ln_f", x)));
    }
    return all;
  }
};

TEST(AuthorsLayout, ImportedModelComputesWhatTheirsDoes) {
  const AuthorsModel theirs;
  const testing::TemporaryFolder folder;
  testing::write_bytes(folder / "config.json", kConfig);
  write_safetensors(folder / "model.safetensors", theirs.named());
  const auto model = load_model(folder.path(), {DType::f64, Device::cpu(), false});
  const std::vector<std::int32_t> tokens = {3, 1, 4, 1, 5, 9, 2, 6};
  const std::vector<Row> expected = theirs.forward(tokens);
  Context context(Device::cpu(), 1);
  DecodeState state = model->make_state(1);
  const Tensor logits = Tensor::empty(Shape({1, kWords}), DType::f64);
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    model->step(context, int_tensor({tokens[t]}), state, logits);
    Row row = expected[t];
    // W_k and W_v were rounded to f32 after they were scaled and centred.
    EXPECT_EQ(testing::check_close("logits", logits, TensorView(row.data(), Shape({1, kWords})), 1e-5), "") << t;
  }

  const testing::TemporaryFolder converted;
  save_model(*load_model(folder.path()), converted.path());
  const auto again = load_model(converted.path());
  EXPECT_THAT(to_json(again->config()), ::testing::HasSubstr("\"output_gate_bias\": true"));
  EXPECT_EQ(fingerprint(*again), fingerprint(*load_model(folder.path())));
}

// Read and written back, their model is what it was: every tensor, but W_v's means over heads, which their norm takes
// away, and W_k to the rounding of two products. The second time nothing changes at all but W_k's last bits.
TEST(AuthorsLayout, ModelsGoBack) {
  const AuthorsModel theirs;
  const testing::TemporaryFolder folder, ours, back;
  testing::write_bytes(folder / "config.json", kConfig);
  write_safetensors(folder / "model.safetensors", theirs.named());
  save_model(*load_model(folder.path()), ours.path(), {.layout = "fla"});
  save_model(*load_model(ours.path()), back.path(), {.layout = "authors"});
  const auto config = parse_json<nlohmann::ordered_json>(read_file(back / "config.json"), "config.json");
  const auto expected_config = nlohmann::ordered_json::parse(kConfig);
  for (const auto& [key, value] : expected_config.items()) EXPECT_EQ(config[key], value) << key;
  AuthorsModel again;
  const SafetensorsReader file(back / "model.safetensors");
  file.read([&](const StoredTensor& stored) -> TensorView { return again.tensors.at(stored.name); });
  ASSERT_EQ(file.tensors().size(), theirs.tensors.size());
  for (const auto& [name, tensor] : theirs.tensors) {
    if (name.ends_with("v_proj.weight")) continue;
    const double allowed = name.ends_with("k_proj.weight") ? 2e-7 : 0.0;
    EXPECT_LE(testing::difference(again.tensors.at(name), tensor).relative, allowed) << name;
  }
  const std::vector<std::int32_t> tokens = {3, 1, 4, 1, 5, 9, 2, 6};
  const std::vector<Row> expected = theirs.forward(tokens), logits = again.forward(tokens);
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    for (std::size_t i = 0; i < expected[t].size(); ++i) EXPECT_NEAR(logits[t][i], expected[t][i], 1e-5);
  }
}

TEST(AuthorsLayout, WhatItCannotSayIsRefused) {
  const testing::TemporaryFolder folder;
  const auto error_of = [&](const char* json) {
    LanguageModel model(parse_config(json, "config.json"), DType::f32, Device::cpu(), false);
    model.parameters().initialize(1);
    return testing::error_of([&] { save_model(model, folder.path(), {.layout = "authors"}); });
  };
  EXPECT_THAT(error_of(R"({"model_type": "gla", "hidden_size": 8, "num_hidden_layers": 1, "num_heads": 2,
                           "vocab_size": 11, "norm_eps": 1e-5, "elementwise_affine": false, "output_gate_bias": true})"),
              ::testing::HasSubstr("no place for model.layers.0.attn.v_proj.weight, whose means"));
  EXPECT_THAT(error_of(R"({"model_type": "gla", "hidden_size": 8, "num_hidden_layers": 1, "num_heads": 2,
                           "vocab_size": 11, "norm_eps": 1e-5})"),
              ::testing::HasSubstr("layout authors: has no place for output_gate_bias false"));
  EXPECT_THAT(error_of(R"({"model_type": "gla", "hidden_size": 8, "num_hidden_layers": 1, "num_heads": 2,
                           "vocab_size": 11, "norm_eps": 1e-5, "elementwise_affine": false, "output_gate_bias": true,
                           "use_short_conv": true})"),
              ::testing::HasSubstr("no place for use_short_conv true"));
}

TEST(AuthorsLayout, MistakesAreNamed) {
  const AuthorsModel theirs;
  const testing::TemporaryFolder folder;
  testing::write_bytes(folder / "config.json", kConfig);
  const auto load = [&](std::vector<NamedTensor> tensors) {
    write_safetensors(folder / "model.safetensors", tensors);
    return testing::error_of([&] { load_model(folder.path()); });
  };
  std::vector<NamedTensor> missing = theirs.named();
  missing.pop_back();
  EXPECT_THAT(load(missing), ::testing::HasSubstr("no tensor 'transformer.wte.weight' [11,8]"));
  std::vector<NamedTensor> more = theirs.named();
  more.push_back({"transformer.h.0.attn.v_gate.weight", more.front().tensor});
  EXPECT_THAT(load(more), ::testing::HasSubstr("v_gate.weight' [11,8] has no place"));
  EXPECT_THAT(testing::error_of([] { parse_config(R"({"d_model": 8, "n_layer": 2, "use_gv": true})", "c"); }),
              ::testing::HasSubstr("use_gv is true; expected false"));
  EXPECT_THAT(testing::error_of([] { parse_config(R"({"d_model": "8", "n_layer": 2})", "c"); }),
              ::testing::HasSubstr("d_model is \"8\"; expected an integer"));
}

}  // namespace
}  // namespace flashgla::model
