#include "flashgla/mixers/gla/config.h"

#include <cmath>

#include "flashgla/mixers/gated_layer.h"
#include "flashgla/mixers/gla/authors_layout.h"
#include "flashgla/mixers/gla/gla.h"

namespace flashgla::mixers {

std::vector<Field> GlaConfig::fields() {
  return {{"expand_k", &expand_k},
          {"expand_v", &expand_v},
          {"num_heads", &num_heads},
          {"num_kv_heads", &num_kv_heads},
          {"feature_map", &feature_map},
          {"use_short_conv", &use_short_conv},
          {"conv_size", &conv_size},
          {"use_output_gate", &use_output_gate},
          {"output_gate_bias", &output_gate_bias},
          {"clamp_min", &clamp_min},
          {"elementwise_affine", &elementwise_affine},
          {"gate_logit_normalizer", &gate_logit_normalizer},
          {"gate_low_rank_dim", &gate_low_rank_dim}};
}

std::vector<Field> GlaVariantConfig::fields() {
  std::vector<Field> all = GlaConfig::fields();
  all.push_back({"gate", &gate});
  return all;
}

namespace {
using Gate = GatedLayerSettings::Gate;

Gate gate_from_name(const std::string& name) {
  if (name == "key") return Gate::key;
  if (name == "scalar") return Gate::scalar;
  if (name == "constant") return Gate::constant;
  if (name == "value") return Gate::value;
  if (name == "key_value") return Gate::key_value;
  require(name == "none", "gate", "'" + name + "'", "'key', 'value', 'key_value', 'scalar', 'constant' or 'none'");
  return Gate::none;
}
}  // namespace

void GlaConfig::validate(const Common& common) const {
  require_heads(common, num_heads, expand_k, expand_v);
  require_kv_heads(num_kv_heads, num_heads);
  if (feature_map) ops::gated_linear_attention::feature_map_from_name(*feature_map);
  if (use_short_conv) require_width("conv_size", conv_size);
  require(!clamp_min || *clamp_min <= 0.0, "clamp_min", std::to_string(clamp_min.value_or(0.0)), "at most 0");
  require(std::isfinite(gate_logit_normalizer) && gate_logit_normalizer > 0.0, "gate_logit_normalizer",
          std::to_string(gate_logit_normalizer), "a positive number");
  require_size("gate_low_rank_dim", gate_low_rank_dim, 1 << 20);
  gate_from_name(gate);
}

std::unique_ptr<Mixer> GlaConfig::create(const Common& common, std::int64_t layer) const {
  GatedLayerSettings settings;
  settings.common = common;
  settings.name = layer_prefix(layer) + ".attn";
  settings.num_heads = num_heads;
  settings.kv_heads = kv_heads();
  settings.key_dim = expanded(common, expand_k);
  settings.value_dim = expanded(common, expand_v);
  if (feature_map) settings.feature_map = ops::gated_linear_attention::feature_map_from_name(*feature_map);
  settings.conv_size = use_short_conv ? conv_size : 0;
  settings.gate = gate_from_name(gate);
  settings.constant_gate = retention_decays(kv_heads());
  settings.gate_low_rank_dim = gate_low_rank_dim;
  settings.gate_logit_normalizer = gate_logit_normalizer;
  settings.clamp_min = clamp_min;
  settings.output_gate = use_output_gate;
  settings.output_gate_bias = output_gate_bias;
  if (elementwise_affine) settings.norm_name = use_output_gate ? ".g_norm_swish_gate.weight" : ".g_norm.weight";
  return make_gated_layer(settings);
}

namespace {

constexpr Renaming kGlaOlderNames[] = {{".g_norm_swish_gate.", ".g_norm."}};  // or saved unfused
constexpr Renaming kGlaOlderKeys[] = {{"norm_eps", "rms_norm_eps"}};
constexpr Refusal kGlaRefused[] = {{"use_gk", "true"}, {"use_gv", "false"}};

constexpr Layout kGlaLayouts[] = {
    {.name = "fla",
     .model_type = "gla",
     .architecture = "GLAForCausalLM",
     .older_keys = kGlaOlderKeys,
     .refused = kGlaRefused,
     .older_names = kGlaOlderNames},
    kGlaAuthorsLayout,
};

constexpr Layout kVariantLayouts[] = {{.name = "fla",
                                       .model_type = "gla_variant",
                                       .architecture = "GLAVariantForCausalLM",
                                       .older_names = kGlaOlderNames}};

constexpr PresetRow kVariantPresets[] = {
    {"gla-340m-scalar", "the paper's ablation: a scalar gate a head",
     R"({"hidden_size": 1024, "num_heads": 4, "tie_word_embeddings": true, "gate": "scalar"})"},
    {"gla-340m-value", "the first version's ablation: a gate over the values' channels alone",
     R"({"hidden_size": 1024, "num_heads": 4, "tie_word_embeddings": true, "gate": "value"})"},
    {"gla-340m-both", "the first version's ablation: gates over keys and values",
     R"({"hidden_size": 1024, "num_heads": 4, "tie_word_embeddings": true, "gate": "key_value"})"},
    {"gla-340m-constant", "the paper's ablation: RetNet's fixed decays",
     R"({"hidden_size": 1024, "num_heads": 4, "tie_word_embeddings": true, "gate": "constant"})"},
    {"gla-340m-none", "the paper's ablation: no gate",
     R"({"hidden_size": 1024, "num_heads": 4, "tie_word_embeddings": true, "gate": "none"})"},
};

constexpr PresetRow kGlaPresets[] = {
    // initializer_range: ahead of 0.02 at this width (train/README.md)
    {"gla-tiny", "0.8M parameters, byte level: minutes on two cores",
     R"({"hidden_size": 128, "num_hidden_layers": 4, "num_heads": 2, "intermediate_size": 320, "use_short_conv": true,
         "initializer_range": 0.05, "tie_word_embeddings": true, "vocab_size": 258, "bos_token_id": 256,
         "eos_token_id": 257})"},
    {"gla-small", "7M parameters, byte level: an evening on two cores",
     R"({"hidden_size": 256, "num_hidden_layers": 8, "num_heads": 4, "intermediate_size": 768, "use_short_conv": true,
         "tie_word_embeddings": true, "vocab_size": 258, "bos_token_id": 256, "eos_token_id": 257})"},
    {"gla-medium", "25M parameters, 8192 words",
     R"({"hidden_size": 384, "num_hidden_layers": 12, "num_heads": 4, "tie_word_embeddings": true,
         "vocab_size": 8192})"},
    {"gla-340m", "the paper's 340M model, tied embeddings",
     R"({"hidden_size": 1024, "num_hidden_layers": 24, "num_heads": 4, "tie_word_embeddings": true})"},
    {"gla-1.3b", "the paper's 1.3B model", R"({"hidden_size": 2048, "num_hidden_layers": 24, "num_heads": 4})"},
    {"gla-2.7b", "the 2.7B model of flash-linear-attention",
     R"({"hidden_size": 2560, "num_hidden_layers": 32, "num_heads": 5})"},
};

}  // namespace

constinit const Registration kGla{"gla", "gated linear attention (Yang et al. 2024)",
                                  []() -> std::unique_ptr<Config> { return std::make_unique<GlaConfig>(); },
                                  kGlaLayouts, kGlaPresets};

constinit const Registration kGlaVariant{
    "gla_variant", "GLA's layer with another gate: of values, both sides, scalar, constant, none",
    []() -> std::unique_ptr<Config> { return std::make_unique<GlaVariantConfig>(); }, kVariantLayouts, kVariantPresets};

}  // namespace flashgla::mixers
