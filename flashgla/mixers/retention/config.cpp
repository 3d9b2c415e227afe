#include "flashgla/mixers/gated_layer.h"
#include "flashgla/mixers/retention/retention.h"

namespace flashgla::mixers {

namespace {

constexpr double kRopeBase = 1e4;  // flash-linear-attention's, not in its config

struct RetentionConfig : ConfigOf<RetentionConfig> {
  double expand_k = 1.0;
  double expand_v = 2.0;
  std::int64_t num_heads = 8;
  bool use_output_gate = true;
  bool elementwise_affine = true;  // the norm of the heads' outputs has a weight

  std::vector<Field> fields() override {
    return {{"expand_k", &expand_k},
            {"expand_v", &expand_v},
            {"num_heads", &num_heads},
            {"use_output_gate", &use_output_gate},
            {"elementwise_affine", &elementwise_affine}};
  }

  void validate(const Common& common) const override {
    require_heads(common, num_heads, expand_k, expand_v);
    const std::int64_t channels = expanded(common, expand_k) / num_heads;
    require(channels % 2 == 0 && channels <= 1024, "num_heads", std::to_string(num_heads),
            "heads of an even number of key channels, at most 1024");
    require(num_heads <= 48, "num_heads", std::to_string(num_heads), "at most 48: decays beyond are 1");
  }

  std::unique_ptr<Mixer> create(const Common& common, std::int64_t layer) const override {
    GatedLayerSettings settings;
    settings.common = common;
    settings.name = layer_prefix(layer) + ".attn";
    settings.num_heads = settings.kv_heads = num_heads;
    settings.key_dim = expanded(common, expand_k);
    settings.value_dim = expanded(common, expand_v);
    settings.rope_base = kRopeBase;
    settings.gate = GatedLayerSettings::Gate::constant;
    settings.constant_gate = retention_decays(num_heads);
    settings.output_gate = use_output_gate;
    if (elementwise_affine) settings.norm_name = use_output_gate ? ".g_norm_swish_gate.weight" : ".g_norm.weight";
    return make_gated_layer(settings);
  }
};

constexpr Renaming kRetentionOlderNames[] = {{".g_norm_swish_gate.", ".g_norm."}};
constexpr Renaming kRetentionOlderKeys[] = {{"norm_eps", "rms_norm_eps"}, {"num_heads", "num_attention_heads"}};
// Keys and values shared by heads with decays of their own are not implemented.
constexpr Refusal kRetentionRefused[] = {{"num_kv_heads", ""}, {"feature_map", ""}};
// In flash-linear-attention's configs, but its model never looks at them.
constexpr const char* kWithoutEffectOnRetention[] = {"use_short_conv", "conv_size"};

constexpr Layout kRetentionLayouts[] = {{.name = "fla",
                                         .model_type = "retnet",
                                         .architecture = "RetNetForCausalLM",
                                         .defaults = R"({"hidden_ratio": 2})",
                                         .older_keys = kRetentionOlderKeys,
                                         .refused = kRetentionRefused,
                                         .without_effect = kWithoutEffectOnRetention,
                                         .older_names = kRetentionOlderNames}};

constexpr PresetRow kRetentionPresets[] = {
    {"retnet-340m", "the paper's RetNet of about 340M, tied embeddings",
     R"({"hidden_size": 1024, "num_hidden_layers": 24, "num_heads": 4, "tie_word_embeddings": true})"},
    {"retnet-1.3b", "the paper's 1.3B RetNet", R"({"hidden_size": 2048, "num_hidden_layers": 24, "num_heads": 8})"},
};

}  // namespace

constinit const Registration kRetention{"retnet", "multi-scale retention (Sun et al. 2023)",
                                        []() -> std::unique_ptr<Config> { return std::make_unique<RetentionConfig>(); },
                                        kRetentionLayouts, kRetentionPresets};

}  // namespace flashgla::mixers
