// A small model on a device and what generates with it; with the same weights on every one.
#pragma once

#include <memory>
#include <vector>

#include "flashgla/generate/generator.h"
#include "testing/compare.h"

namespace flashgla::generate {

inline model::ModelConfig small_config(const char* use_short_conv) {
  model::ModelConfig config;
  config.hidden_size = 64;
  config.num_hidden_layers = 2;
  config.set("num_heads", "2");
  config.intermediate_size = 96;
  config.set("use_short_conv", use_short_conv);
  config.initializer_range = 0.3;  // far from uniform
  config.vocab_size = 258;
  config.bos_token_id = 256;
  config.eos_token_id = 257;
  return config;
}

struct SmallModel {
  explicit SmallModel(Device device, const char* use_short_conv = "true")
      : context(device, 2),
        model(small_config(use_short_conv), DType::f32, device, false),
        tokenizer(text::make_byte_tokenizer()),
        generator(context, model, *tokenizer) {
    model.parameters().initialize(3);
  }

  std::vector<char> logits(const Session& session) {
    context.queue().synchronize();
    const Tensor host = testing::copied_to(session.logits, Device::cpu());
    const auto* bytes = static_cast<const char*>(host->data);
    return {bytes, bytes + host->bytes()};
  }

  Context context;
  model::LanguageModel model;
  std::unique_ptr<text::Tokenizer> tokenizer;
  Generator generator;
};

}  // namespace flashgla::generate
