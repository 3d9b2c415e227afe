// Configurations drawn at random, for every mixer: each is refused by name, or it is a model that is written and read
// back, whose steps are its prefill, and whose gradients are those of finite differences.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "flashgla/base/error.h"
#include "flashgla/model/tests/cases.h"

namespace flashgla::model {
namespace {

class Draws {
 public:
  explicit Draws(std::uint64_t seed) : seed_(seed) {}
  std::size_t below(std::size_t count) {
    return static_cast<std::size_t>(testing::uniform(seed_, next_++) * static_cast<double>(count));
  }
  template <class T>
  T of(const std::vector<T>& values) {
    return values[below(values.size())];
  }

 private:
  std::uint64_t seed_, next_ = 0;
};

// JSON texts that a field may be given: by its name where values are few, else by its type.
std::string value_for(Draws& draws, const mixers::Field& field, const std::string& mixer) {
  const std::string name = field.name;
  const std::map<std::string, std::vector<std::string>> named = {
      {"gate", {"\"key\"", "\"scalar\"", "\"constant\"", "\"value\"", "\"key_value\"", "\"none\"", "\"other\""}},
      {"conv_size", {"1", "2", "3", "4", "5"}},
      {"conv_kernel", {"1", "2", "3", "4", "5"}},
      {"clamp_min", {"null", "-0.06", "-1.0", "0.5"}},
      {"gate_logit_normalizer", {"1.0", "16.0", "0.0"}},
      {"rope_theta", {"1e4", "100.0", "1.0"}},
      {"l_max", {"9", "64", "80"}},
      {"emb_dim", {"3", "5", "4"}},
      {"w", {"1.0", "10.0"}},
      {"norm_q", {"false"}},  // a sum of features of either sign may be 0
      {"norm_k", {"false"}},
      {"shift", {"0.0", "0.1"}},
      {"expand", {"1", "2", "3"}},
      {"window_size", {"null", "1", "3", "20"}},
      {"feature_map", mixer == "linear_attn"
                          ? std::vector<std::string>{"\"identity\"", "\"relu\"", "\"elu\"", "\"t2r\"", "\"hedgehog\"",
                                                     "\"elementwise_product\"", "\"dpfp\"", "\"tanh\""}
                          : std::vector<std::string>{"null", "\"relu\"", "\"elu_plus_one\"", "\"tanh\""}}};
  if (const auto row = named.find(name); row != named.end()) return draws.of(row->second);
  const std::vector<std::string> sizes = {"1", "2", "2", "3", "4", "6", "8"};
  if (std::holds_alternative<bool*>(field.value)) return draws.of<std::string>({"true", "false"});
  if (std::holds_alternative<std::int64_t*>(field.value)) return draws.of(sizes);
  if (std::holds_alternative<double*>(field.value)) return draws.of<std::string>({"0.5", "1.0", "2.0", "0.75"});
  return draws.below(2) == 0 ? "null" : draws.of(sizes);
}

ModelConfig random_config(Draws& draws, const mixers::Registration& row) {
  ModelConfig config(row.name);
  config.hidden_size = draws.of<std::int64_t>({8, 12, 16, 24});
  config.num_hidden_layers = draws.of<std::int64_t>({1, 2, 3});
  config.intermediate_size = draws.of<std::int64_t>({5, 8, 20});
  config.vocab_size = 17;
  config.bos_token_id = config.eos_token_id = 0;
  config.max_position_embeddings = 40;
  config.norm_eps = 0.05;  // heads of one channel: with the usual one their norm is a step
  for (const char* name : {"use_mlp", "identity_mlp", "embedding_norm", "learned_positions", "tie_word_embeddings"}) {
    if (draws.below(3) == 0) config.set(name, draws.of<std::string>({"true", "false"}));
  }
  if (draws.below(3) == 0) config.norm_type = "layer_norm";
  for (const mixers::Field& field : config.mixer->fields()) {
    // Half of the fields keep their default, but for sizes that are those of large models.
    auto* const* size = std::get_if<std::int64_t*>(&field.value);
    const bool large = size != nullptr && **size > 8;
    if (large || draws.below(2) == 0) config.set(field.name, value_for(draws, field, row.name));
  }
  if (draws.below(4) == 0 && config.num_hidden_layers > 1) {
    OtherLayers other{{1}, &mixers::find_mixer("transformer"), mixers::find_mixer("transformer").make_config()};
    for (const mixers::Field& field : other.mixer->fields()) {
      if (std::string(field.name) == "num_heads") **std::get_if<std::int64_t*>(&field.value) = 2;
    }
    config.others.push_back(other);
  }
  return config;
}

// The logits behind the last of some tokens, step by step and at once, and the states.
void expect_steps_to_be_the_prefill(LanguageModel& model) {
  constexpr std::int64_t kLength = 9;
  const std::int64_t words = model.config().vocab_size;
  Context context(Device::cpu(), 1);
  const std::int64_t capacity = std::min(kCapacity, model.config().most_tokens().count);
  const Tensor tokens = random_tokens(Shape({kLength}), words, 5);
  const Tensor stepped = Tensor::empty(Shape({1, words}), DType::f64);
  const Tensor filled = Tensor::empty(Shape({1, words}), DType::f64);
  DecodeState one = model.make_state(1, capacity), other = model.make_state(1, capacity);
  for (std::int64_t t = 0; t < kLength; ++t)
    model.step(context, int_tensor({tokens.as<std::int32_t>()[t]}), one, stepped);
  const Tensor bounds = int_tensor({0, static_cast<std::int32_t>(kLength)});
  model.prefill(context, tokens, {bounds, bounds}, other, filled);
  EXPECT_EQ(testing::check_close("logits", stepped, filled, 1e-11), "");
  EXPECT_EQ(compare_states(one, other, 1e-11), "");
}

void expect_gradients(LanguageModel& model) {
  const Shape shape({2, 6});
  const Tensor tokens = random_tokens(shape, model.config().vocab_size, 6);
  const Tensor targets = random_tokens(shape, model.config().vocab_size, 7);
  const Tensor losses = Tensor::empty(Shape({shape.numel()}), DType::f64);
  Context context(Device::cpu(), 1);
  Arena saved;
  nn::Pass pass{context, &saved};
  model.parameters().zero_gradients();
  model.forward_backward(pass, tokens, targets, losses, 1.0);
  const auto loss = [&] {
    nn::Pass evaluation{context};
    model.evaluate(evaluation, tokens, targets, losses);
    return std::accumulate(losses.as<double>(), losses.as<double>() + losses->numel(), 0.0);
  };
  // Two steps, so that the third derivative falls out: how much it bends is not known of a configuration.
  constexpr double kStep = 1e-5;
  for (const nn::Parameter* parameter : model.parameters().parameters()) {
    const std::int64_t count = parameter->value.numel();
    auto* values = parameter->value.as<double>();
    const auto* gradient = parameter->gradient.as<double>();
    double largest = 1e-2;  // the losses' rounding over the step is 1e-9
    for (std::int64_t i = 0; i < count; ++i) largest = std::max(largest, std::abs(gradient[i]));
    for (const std::int64_t i : {count / 3, count - 1}) {
      const double value = values[i];
      const auto slope = [&](double step) {
        values[i] = value + step;
        const double above = loss();
        values[i] = value - step;
        const double below = loss();
        values[i] = value;
        return (above - below) / (2.0 * step);
      };
      EXPECT_NEAR((4.0 * slope(kStep) - slope(2.0 * kStep)) / 3.0, gradient[i], 1e-6 * largest) << parameter->name;
    }
  }
}

class RandomConfigs : public ::testing::TestWithParam<const mixers::Registration*> {};
INSTANTIATE_TEST_SUITE_P(Registry, RandomConfigs,
                         ::testing::ValuesIn(mixers::registry().begin(), mixers::registry().end()),
                         [](const auto& row) { return std::string(row.param->name); });

// Those of the first `count` seeds that are valid.
std::vector<ModelConfig> valid_configs(const mixers::Registration& row, std::uint64_t count) {
  std::vector<ModelConfig> valid;
  for (std::uint64_t seed = 0; seed < count; ++seed) {
    Draws draws(seed);
    const ModelConfig config = random_config(draws, row);
    try {
      config.validate();
      valid.push_back(config);
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("; expected "), std::string::npos) << error.what();
    }
  }
  EXPECT_GT(valid.size(), count / 10);
  return valid;
}

TEST_P(RandomConfigs, AreRefusedByNameOrWork) {
  for (const ModelConfig& config : valid_configs(*GetParam(), 60)) {
    const std::string json = to_json(config);
    SCOPED_TRACE(json);
    EXPECT_EQ(to_json(parse_config(json, "written")), json);
    const auto model = make_small(config, DType::f64, false);
    EXPECT_EQ(model->parameters().count(), parameter_count(config));
    expect_steps_to_be_the_prefill(*model);
    if (HasFailure()) return;
  }
}

TEST_P(RandomConfigs, GradientsAgreeWithFiniteDifferences) {
  for (const ModelConfig& config : valid_configs(*GetParam(), 20)) {
    SCOPED_TRACE(to_json(config));
    const auto model = make_small(config, DType::f64, true);
    expect_gradients(*model);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace flashgla::model
