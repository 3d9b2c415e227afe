// bf16 on every device beside bf16 on the CPU: both are as far from the f64 model with the same weights.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "flashgla/base/names.h"
#include "flashgla/mixers/registry.h"
#include "flashgla/model/tests/cases.h"
#include "testing/compare.h"
#include "testing/devices.h"

namespace flashgla::model {
namespace {

constexpr std::int64_t kBatch = 2, kLength = 130;
constexpr std::int64_t kSmall = 1000;  // tensors of fewer elements are taken together

// Logits, losses and gradients of one batch, in f64 on the CPU, by name; small tensors one behind the other as "small".
std::map<std::string, std::vector<double>> results_of(LanguageModel& model, std::uint64_t seed) {
  const Device device = model.device();
  Context context(device, 1);
  Arena saved(device);
  nn::Pass pass{context, &saved};
  const Shape shape({kBatch, kLength});
  const Tensor tokens = testing::copied_to(random_tokens(shape, model.config().vocab_size, 2 * seed), device);
  const Tensor targets = testing::copied_to(random_tokens(shape, model.config().vocab_size, 2 * seed + 1), device);
  const DType wide = model.dtype() == DType::f64 ? DType::f64 : DType::f32;
  const Tensor hidden = Tensor::empty(Shape({kLength, model.config().hidden_size}), model.dtype(), device);
  const Tensor logits = Tensor::empty(Shape({kLength, model.config().vocab_size}), wide, device);
  model.hidden_states(pass, tokens->slice(0, 0, 1), hidden);
  model.logits(context, hidden, logits);
  const Tensor losses = Tensor::empty(Shape({kBatch * kLength}), wide, device);
  model.parameters().zero_gradients();
  model.forward_backward(pass, tokens, targets, losses, 1.0 / static_cast<double>(kBatch * kLength));
  context.queue().synchronize();
  std::map<std::string, std::vector<double>> results;
  const auto add = [&](const std::string& name, const TensorView& view) {
    const Tensor values = testing::converted(testing::copied_to(view, Device::cpu()), DType::f64);
    std::vector<double>& row = results[name != "losses" && view.numel() < kSmall ? "small" : name];
    row.insert(row.end(), values.as<double>(), values.as<double>() + values->numel());
  };
  add("logits", logits);
  add("losses", losses);
  for (const nn::Parameter* parameter : model.parameters().parameters()) add(parameter->name, parameter->gradient);
  return results;
}

double relative_error(const std::vector<double>& x, const std::vector<double>& truth) {
  double difference = 0.0, norm = 0.0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    difference += (x[i] - truth[i]) * (x[i] - truth[i]);
    norm += truth[i] * truth[i];
  }
  return std::sqrt(difference / norm);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return 0.5 * (values[values.size() / 2] + values[(values.size() - 1) / 2]);
}

struct Case {
  const char* name;
  const char* fields;
};

constexpr Case kCases[] = {
    {"gla", R"("model_type": "gla", "num_heads": 2)"},
    {"gla_convolution", R"("model_type": "gla", "num_heads": 2, "use_short_conv": true)"},
    {"gla_variant", R"("model_type": "gla_variant", "num_heads": 2, "gate": "scalar")"},
    {"transformer", R"("model_type": "transformer", "num_heads": 1)"},
    {"linear_attn", R"("model_type": "linear_attn", "num_heads": 2)"},
    {"retnet", R"("model_type": "retnet", "num_heads": 2)"},
    {"hgrn2", R"("model_type": "hgrn2", "expand_ratio": 32)"},
    {"gsa", R"("model_type": "gsa", "num_heads": 2, "num_slots": 16)"},
    {"mamba", R"("model_type": "mamba", "state_size": 16)"},
    {"mamba2", R"("model_type": "mamba2", "head_dim": 32, "state_size": 16)"},
    {"rwkv", R"("model_type": "rwkv", "zero_init": false)"},
    {"hyena", R"("model_type": "hyena", "l_max": 130)"},
};

TEST(RoundingCases, HaveEveryMixer) {
  for (const mixers::Registration* mixer : mixers::registry()) {
    EXPECT_TRUE(std::ranges::any_of(kCases, [&](const Case& each) { return mixer->name == std::string(each.name); }))
        << mixer->name;
  }
}

class Rounding : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Models, Rounding, ::testing::ValuesIn(kCases),
                         [](const auto& parameter) { return std::string(parameter.param.name); });

TEST_P(Rounding, ErrorsOfBf16AreThoseOfTheCpu) {
  const ModelConfig config = parse_config(
      std::string(R"({"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 259, )") + GetParam().fields + "}",
      GetParam().name);
  bool another = false;
  for (const Device device : testing::test_devices()) {
    if (device.kind == Device::Kind::cpu) continue;  // the yardstick itself
    another = true;
    std::map<std::string, std::vector<double>> ratios;
    for (std::uint64_t seed = 1; seed <= 10; ++seed) {
      LanguageModel cpu(config, DType::bf16, Device::cpu(), true), here(config, DType::bf16, device, true);
      LanguageModel exact(config, DType::f64, Device::cpu(), true);
      cpu.parameters().initialize(seed);
      here.parameters().initialize(seed);
      copy(cpu.parameters().all_values(), exact.parameters().all_values());
      const auto truth = results_of(exact, seed), yardstick = results_of(cpu, seed), measured = results_of(here, seed);
      for (const auto& [name, values] : truth) {
        const double ratio = relative_error(measured.at(name), values) / relative_error(yardstick.at(name), values);
        ratios[name].push_back(ratio);
        EXPECT_LT(ratio, 3.0) << name_of(device) << " " << name << " seed " << seed;
      }
    }
    for (const auto& [name, row] : ratios) EXPECT_LE(median(row), 1.5) << name_of(device) << " " << name;
  }
  if (!another) GTEST_SKIP() << "no device but the CPU, which is the yardstick";
}

}  // namespace
}  // namespace flashgla::model
