#include "flashgla/model/quantise.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "flashgla/base/file.h"
#include "flashgla/model/checkpoint.h"
#include "flashgla/model/tests/cases.h"
#include "testing/compare.h"
#include "testing/conformance.h"
#include "testing/devices.h"
#include "testing/temporary_folder.h"

namespace flashgla::model {
namespace {

using testing::error_of;
using ::testing::HasSubstr;

std::unique_ptr<LanguageModel> quantised(const LanguageModel& model, const std::string& preset) {
  QuantiseOptions options;
  options.preset = find_quantisation_preset(preset);
  return quantise(model, options);
}

// Matrices of whole panels and groups too, beside the small ones, which are padded or stay as they are.
std::vector<SmallModel> models() {
  std::vector<SmallModel> all = small_models();
  for (const char* type : {"gla", "transformer", "mamba2", "retnet"}) {
    ModelConfig config(type);
    config.hidden_size = 64;
    config.num_hidden_layers = 2;
    config.intermediate_size = 96;
    config.vocab_size = 50;
    if (config.model_type != "mamba2") config.set("num_heads", "2");
    if (config.model_type == "mamba2") config.set("num_heads", "2"), config.set("head_dim", "64");
    all.push_back({type, config});
  }
  return all;
}
SmallModel wide() { return models()[small_models().size()]; }

bool is_packed(const nn::Parameter& parameter) { return ops::quantised_linear::is_packed(parameter.value); }

// Logits after a text that is given token by token, or at once.
Tensor logits_of(LanguageModel& model, bool steps, int threads = 2) {
  constexpr std::int32_t kTokens = 24;
  Context context(model.device(), threads);
  DecodeState state = model.make_state(1, kTokens);
  const Tensor logits = Tensor::empty({1, model.config().vocab_size}, DType::f32, model.device());
  std::vector<std::int32_t> tokens;
  tokens.reserve(kTokens);
  for (std::int32_t t = 0; t < kTokens; ++t) {
    tokens.push_back(static_cast<std::int32_t>((t * 7 + 3) % model.config().vocab_size));
  }
  if (steps) {
    for (std::int32_t& token : tokens) {
      const ArenaScope scope(context.scratch());
      model.step(context, on_device(context, TensorView(&token, Shape({1})), "token"), state, logits);
      context.queue().synchronize();
    }
  } else {
    const ArenaScope scope(context.scratch());
    std::int32_t bounds[] = {0, kTokens};
    const TensorView host(bounds, Shape({2}));
    model.prefill(context, on_device(context, TensorView(tokens.data(), Shape({kTokens})), "tokens"),
                  {on_device(context, host, "bounds"), host, 0}, state, logits);
    context.queue().synchronize();
  }
  return testing::copied_to(logits, Device::cpu());
}

TEST(Quantise, EveryMixerFollowsThePresets) {
  for (const SmallModel& row : models()) {
    const auto model = make_small(row.config, DType::bf16, false);
    for (const QuantisationPreset& preset : quantisation_presets()) {
      const auto small = quantised(*model, preset.name);
      std::int64_t packed = 0;
      for (const nn::Parameter* parameter : small->parameters().parameters()) {
        const auto wanted = preset.of(parameter->quantisation);
        EXPECT_EQ(is_packed(*parameter), wanted.has_value()) << parameter->name;
        if (!is_packed(*parameter)) continue;
        ++packed;
        EXPECT_EQ(ops::quantised_linear::format_of(parameter->value), *wanted) << parameter->name;
        EXPECT_EQ(parameter->name.find("gk_proj"), std::string::npos);
      }
      EXPECT_GT(packed, 0) << row.name;
    }
  }
}

TEST(Quantise, StepsAndPromptsAreThoseOfTheDecodedWeights) {
  for (const SmallModel& row : models()) {
    const auto model = make_small(row.config, DType::f32, false);
    for (const char* preset : {"q8", "q4"}) {
      const auto small = quantised(*model, preset);
      const auto decoded = dequantise(*small, DType::f32, Device::cpu());
      for (const bool steps : {true, false}) {
        const Tensor expected = logits_of(*decoded, steps), logits = logits_of(*small, steps);
        // x of 16 bits (6.1e-5 a product at most), magnified by the norm behind a first token's small q k.
        EXPECT_EQ(testing::check_close(preset, logits, expected, 5e-3), "") << row.name << steps;
        EXPECT_TRUE(testing::same_bits(logits, logits_of(*small, steps, 1)));
      }
    }
  }
}

// On a GPU steps have the CPU's integers; prompts have weights decoded as the activations' dtype, and in bf16 are as
// far from the CPU's as those of the same weights in floats.
TEST(Quantise, AGpuHasTheCpusLogits) {
  for (const Device device : testing::test_devices()) {
    if (device == Device::cpu()) continue;
    double packed_errors = 0.0, float_errors = 0.0;
    for (const SmallModel& row : models()) {
      for (const DType dtype : {DType::bf16, DType::f32}) {
        const auto model = make_small(row.config, dtype, false);
        for (const char* preset : {"q8", "q4", "q4-all"}) {
          const auto small = quantised(*model, preset), there = copied_to(*small, device);
          const std::string what = row.name + " " + preset + " " + name_of(dtype);
          for (const bool steps : {true, false}) {
            EXPECT_EQ(testing::check_close("logits", logits_of(*there, steps), logits_of(*small, steps), 5e-3), "")
                << what << steps;
          }
          if (dtype != DType::bf16) continue;
          const auto decoded = dequantise(*small, dtype, device);
          there->set_inference_dtype(dtype);
          decoded->set_inference_dtype(dtype);
          const Tensor expected = logits_of(*small, false);
          packed_errors += testing::difference(logits_of(*there, false), expected).relative;
          float_errors += testing::difference(logits_of(*decoded, false), expected).relative;
        }
      }
    }
    EXPECT_GT(packed_errors, 0.0);
    EXPECT_LT(packed_errors, 1.2 * float_errors);
  }
}

TEST(Quantise, ACalibrationKnowsEveryLayersInputs) {
  const auto model = make_small(wide().config, DType::f32, false);
  std::vector<std::int32_t> tokens;
  tokens.reserve(300);
  for (std::int32_t t = 0; t < 300; ++t) tokens.push_back(t * t % 50);
  Context context;
  const Calibration calibration(context, *model, tokens, 128, true);
  const auto found = [&](const std::string& name) {
    for (const nn::Parameter* parameter : model->parameters().parameters()) {
      EXPECT_FALSE(parameter->observe) << parameter->name;
      if (parameter->name == name) return calibration.squares_of(*parameter);
    }
    return TensorView();
  };
  const std::string layer = "model.layers.1.";
  EXPECT_EQ(found(layer + "attn.q_proj.weight").data, found(layer + "attn.v_proj.weight").data);
  EXPECT_EQ(found(layer + "mlp.gate_proj.weight").data, found(layer + "mlp.up_proj.weight").data);
  EXPECT_TRUE(found(layer + "attn.o_proj.weight"));
  EXPECT_NE(found(layer + "attn.o_proj.weight").data, found(layer + "attn.q_proj.weight").data);
  EXPECT_EQ(found(layer + "mlp.down_proj.weight").size(0), 96);
  EXPECT_FALSE(found("lm_head.weight"));
  for (const bool gptq : {false, true}) {
    const auto plain = quantised(*model, "q4");
    QuantiseOptions options;
    options.preset = find_quantisation_preset("q4");
    options.calibration = &calibration;
    options.gptq = gptq;
    const auto small = quantise(*model, options);
    EXPECT_NE(fingerprint(*small), fingerprint(*plain));
    EXPECT_TRUE(testing::difference(logits_of(*small, true), logits_of(*plain, true)).finite);
  }
}

class QuantisedFolder : public ::testing::Test {
 protected:
  testing::TemporaryFolder folder_;
};

TEST_F(QuantisedFolder, ComesBackCopiedAndMapped) {
  for (const SmallModel& row : models()) {
    const auto model = make_small(row.config, DType::bf16, false);
    for (const char* preset : {"q8", "q4", "q4-safe"}) {
      const auto small = quantised(*model, preset);
      save_model(*small, folder_.path());
      const Tensor expected = logits_of(*small, true);
      for (const bool map : {false, true}) {
        LoadOptions options;
        options.map = map;
        const auto loaded = load_model(folder_.path(), options);
        EXPECT_EQ(loaded->dtype(), DType::bf16);
        EXPECT_EQ(fingerprint(*loaded), fingerprint(*small));
        EXPECT_NE(fingerprint(*loaded), fingerprint(*model));
        EXPECT_TRUE(testing::same_bits(logits_of(*loaded, true), expected));
      }
      save_model(*small, folder_.path(), {1000});
      EXPECT_EQ(fingerprint(*load_model(folder_.path())), fingerprint(*small));
      EXPECT_THAT(error_of([&] { load_model(folder_.path(), {.map = true}); }), HasSubstr("flashgla convert writes"));
    }
    save_model(*model, folder_.path());
    const auto mapped = load_model(folder_.path(), {.map = true});
    EXPECT_TRUE(testing::same_bits(logits_of(*mapped, true), logits_of(*model, true)));
  }
}

TEST_F(QuantisedFolder, LiesPackedBesideBf16OnAGpu) {
  for (const Device device : testing::test_devices()) {
    if (device == Device::cpu()) continue;
    LoadOptions options;
    options.device = device;
    for (const DType stored : {DType::bf16, DType::f32}) {
      const auto small = quantised(*make_small(wide().config, stored, false), "q4");
      save_model(*small, folder_.path());
      const auto loaded = load_model(folder_.path(), options);
      EXPECT_TRUE(loaded->parameters().packed());
      EXPECT_EQ(loaded->dtype(), DType::bf16);
      const Tensor logits = logits_of(*loaded, true), expected = logits_of(*small, true);
      EXPECT_TRUE(testing::difference(logits, expected).finite);
      if (stored == DType::bf16) {
        EXPECT_EQ(testing::check_close("logits", logits, expected, 5e-3), "");
      }
    }
  }
}

TEST_F(QuantisedFolder, BecomesFloatsWhereADtypeIsAskedFor) {
  const auto small = quantised(*make_small(wide().config, DType::bf16, false), "q4");
  save_model(*small, folder_.path());
  const auto loaded = load_model(folder_.path(), {.dtype = DType::f32});
  EXPECT_FALSE(loaded->parameters().packed());
  EXPECT_EQ(fingerprint(*loaded), fingerprint(*dequantise(*small, DType::f32, Device::cpu())));
}

TEST_F(QuantisedFolder, RefusesByName) {
  const auto model = make_small(wide().config, DType::f32, false);
  const auto small = quantised(*model, "q8");
  save_model(*small, folder_.path());
  EXPECT_THAT(error_of([&] { load_model(folder_.path(), {.dtype = DType::f32, .training = true}); }),
              HasSubstr("its weights are of 8 or 4 bits; train the model in floats"));
  EXPECT_THAT(error_of([&] { quantised(*small, "q4"); }), HasSubstr("are of 8 or 4 bits already"));
  EXPECT_THAT(error_of([&] { find_quantisation_preset("q5"); }), HasSubstr("known: q8, q4, q4-safe, q4-all"));
  EXPECT_THAT(error_of([&] { save_model(*small, folder_.path(), {.mlp_layout = MlpLayout::fused}); }),
              HasSubstr("fused-mlp"));
  EXPECT_THAT(error_of([&] { small->set_inference_dtype(DType::bf16); }), HasSubstr("inference dtype"));

  const std::string path = folder_.path() + "/config.json", config = read_file(path);
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string text = config;
    text.replace(text.find(from), from.size(), to);
    write_file(path, text);
    return error_of([&] { load_model(folder_.path()); });
  };
  EXPECT_THAT(with("\"quant_method\": \"flashgla\"", "\"quant_method\": \"awq\""),
              HasSubstr("quant_method is \"awq\""));
  EXPECT_THAT(with("\"version\": 1", "\"version\": 2"), HasSubstr("version is 2; this program reads 1"));
  EXPECT_THAT(with("quantization_config", "_another_config"), HasSubstr("but by the config it is"));

  for (const char* name : {"model.layers.0.attn.q_proj.weight", "model.norm.weight"}) {
    for (const nn::Parameter* parameter : model->parameters().parameters()) {
      if (parameter->name != name) continue;
      parameter->value.as<float>()[3] = std::nanf("");
      EXPECT_THAT(error_of([&] { quantised(*model, "q8"); }), HasSubstr(std::string(name) + " holds nan"));
      parameter->value.as<float>()[3] = 0.0f;
    }
  }
}

TEST(Quantise, ATiedTableIsStoredOnce) {
  ModelConfig config = wide().config;
  config.tie_word_embeddings = true;
  const auto small = quantised(*make_small(config, DType::f32, false), "q4");
  const nn::Parameter& table = *small->parameters().parameters().front();
  EXPECT_EQ(table.name, "model.embeddings.weight");
  EXPECT_EQ(ops::quantised_linear::format_of(table.value), Format::q8);
  const auto decoded = dequantise(*small, DType::f32, Device::cpu());
  EXPECT_EQ(testing::check_close("tied", logits_of(*small, true), logits_of(*decoded, true), 5e-3), "");
}

}  // namespace
}  // namespace flashgla::model
