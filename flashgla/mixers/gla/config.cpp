#include "flashgla/mixers/gla/config.h"

#include <cmath>

#include "flashgla/mixers/gla/authors_layout.h"
#include "flashgla/mixers/gla/gla.h"
#include "flashgla/ops/gated_linear_attention/gated_linear_attention.h"

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

void GlaConfig::validate(const Common& common) const {
  const auto ratio = [](const char* field, double value) {
    require(value > 0.0 && value <= 64.0, field, std::to_string(value), "more than 0 and at most 64");
  };
  require_size("num_heads", num_heads, common.hidden_size);
  if (num_kv_heads) require_size("num_kv_heads", *num_kv_heads, num_heads);
  require(num_heads % kv_heads() == 0, "num_kv_heads", std::to_string(kv_heads()),
          "a divisor of num_heads " + std::to_string(num_heads));
  ratio("expand_k", expand_k);
  ratio("expand_v", expand_v);
  require(key_dim(common) > 0 && key_dim(common) % num_heads == 0, "expand_k", std::to_string(expand_k),
          "hidden_size * expand_k to be a positive multiple of num_heads " + std::to_string(num_heads));
  require(value_dim(common) > 0 && value_dim(common) % num_heads == 0, "expand_v", std::to_string(expand_v),
          "hidden_size * expand_v to be a positive multiple of num_heads " + std::to_string(num_heads));
  if (feature_map) ops::gated_linear_attention::feature_map_from_name(*feature_map);
  require(!use_short_conv || (conv_size >= 2 && conv_size <= 4), "conv_size", std::to_string(conv_size), "2, 3 or 4");
  require(!clamp_min || *clamp_min <= 0.0, "clamp_min", std::to_string(clamp_min.value_or(0.0)), "at most 0");
  require(std::isfinite(gate_logit_normalizer) && gate_logit_normalizer > 0.0, "gate_logit_normalizer",
          std::to_string(gate_logit_normalizer), "a positive number");
  require_size("gate_low_rank_dim", gate_low_rank_dim, 1 << 20);
}

namespace {

constexpr Renaming kOlderNames[] = {{".g_norm_swish_gate.", ".g_norm."}};  // or saved unfused
constexpr Renaming kOlderKeys[] = {{"norm_eps", "rms_norm_eps"}};
constexpr Refusal kRefused[] = {{"use_gk", "true"}, {"use_gv", "false"}};

constexpr Layout kLayouts[] = {
    {.name = "fla",
     .model_type = "gla",
     .architecture = "GLAForCausalLM",
     .older_keys = kOlderKeys,
     .refused = kRefused,
     .older_names = kOlderNames},
    kGlaAuthorsLayout,
};

constexpr PresetRow kPresets[] = {
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
                                  []() -> std::unique_ptr<Config> { return std::make_unique<GlaConfig>(); }, kLayouts,
                                  kPresets};

}  // namespace flashgla::mixers
