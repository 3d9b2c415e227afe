#include "flashgla/eval/divergence.h"

#include <gtest/gtest.h>

#include <cmath>

#include "flashgla/model/quantise.h"

namespace flashgla::eval {
namespace {

TEST(Divergence, IsZeroOfTheSameModelAndTheDefinitionsOfAnother) {
  model::ModelConfig config("gla");
  config.hidden_size = 64;
  config.num_hidden_layers = 2;
  config.vocab_size = 40;
  config.set("num_heads", "2");
  model::LanguageModel model(config, DType::f32, Device::cpu(), false);
  model.parameters().initialize(1);
  model::QuantiseOptions options;
  options.preset = model::find_quantisation_preset("q4-all");
  const auto small = model::quantise(model, options);
  std::vector<Document> documents(2);
  for (std::int32_t t = 0; t < 70; ++t) documents[static_cast<std::size_t>(t % 2)].tokens.push_back(t * 7 % 40);
  Context context;
  EXPECT_EQ(divergence(context, model, model, documents, 16, 1000).mean, 0.0);
  EXPECT_EQ(divergence(context, model, model, documents, 16, 50).tokens, 50);

  const Divergence one = divergence(context, model, *small, {&documents[0], 1}, 100, 1);
  const auto logits = [&](model::LanguageModel& of) {
    model::DecodeState state = of.make_state(1);
    Tensor out = Tensor::empty({1, 40}, DType::f32);
    of.step(context, TensorView(documents[0].tokens.data(), Shape({1})), state, out);
    return out;
  };
  const Tensor p = logits(model), q = logits(*small);
  double p_sum = 0.0, q_sum = 0.0, expected = 0.0;
  for (int v = 0; v < 40; ++v) p_sum += std::exp(p.as<float>()[v]), q_sum += std::exp(q.as<float>()[v]);
  for (int v = 0; v < 40; ++v) {
    const double share = std::exp(p.as<float>()[v]) / p_sum;
    expected += share * std::log(share * q_sum / std::exp(q.as<float>()[v]));
  }
  EXPECT_EQ(one.tokens, 1);
  EXPECT_NEAR(one.mean, expected, 1e-4 * expected + 1e-9);
  EXPECT_GT(one.mean, 0.0);

  // Between windows it can be ended.
  std::vector<std::int64_t> seen;
  const Divergence part =
      divergence(context, model, *small, documents, 16, 1000, [&](std::int64_t done, std::int64_t total, double) {
        EXPECT_EQ(total, 70);
        seen.push_back(done);
        return seen.size() < 2;
      });
  EXPECT_FALSE(part.complete);
  EXPECT_EQ(part.tokens, 32);
  EXPECT_EQ(seen, (std::vector<std::int64_t>{16, 32}));

  std::fill_n(model.parameters().all_values().as<float>(), model.parameters().count(), std::nanf(""));
  EXPECT_THROW(divergence(context, *small, model, documents, 16, 1000), Error);
}

}  // namespace
}  // namespace flashgla::eval
