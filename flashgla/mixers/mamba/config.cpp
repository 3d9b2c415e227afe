#include "flashgla/mixers/mamba/config.h"

#include "flashgla/mixers/backbone_names.h"
#include "flashgla/mixers/mamba/mamba.h"
#include "flashgla/mixers/mixer.h"

namespace flashgla::mixers {

std::vector<Field> MambaConfig::fields() {
  return {{"state_size", &state_size},   {"expand", &expand},     {"dt_rank", &dt_rank},
          {"conv_kernel", &conv_kernel}, {"use_bias", &use_bias}, {"use_conv_bias", &use_conv_bias}};
}

void MambaConfig::settle(const Common& common) {
  if (!dt_rank) dt_rank = rank(common);
}

void MambaConfig::validate(const Common& common) const {
  require_size("state_size", state_size, 1 << 16);
  require_size("expand", expand, 64);
  require_size("dt_rank", rank(common), 1 << 16);
  require_width("conv_kernel", conv_kernel);
}

namespace {

constexpr Refusal kRefusedOfMamba[] = {{"rms_norm", "true"}};
constexpr Renaming kRankOfMamba[] = {{"dt_rank", "time_step_rank"}};
constexpr auto kHfKeysOfMamba = joined(kBackboneKeys, kRankOfMamba);
// What other fields say already in state-spaces' own words.
constexpr const char* kWithoutEffectOnMamba[] = {
    "d_inner", "d_model", "n_layer", "fused_add_norm", "pad_vocab_size_multiple", "ssm_cfg"};

constexpr Layout kMambaLayouts[] = {
    {.name = "fla",
     .model_type = "mamba",
     .architecture = "MambaForCausalLM",
     .defaults = R"({"hidden_size": 2048, "num_hidden_layers": 48, "norm_eps": 1e-5, "use_mlp": false,
                     "hidden_act": "silu"})",
     .older_keys = kRankOfMamba,
     .refused = kRefusedOfMamba,
     .without_effect = kWithoutEffectOnMamba,
     .names = kBackboneNames,
     .older_names = kOlderBackboneNames},
    {.name = "hf",
     .model_type = "mamba",
     .architecture = "MambaForCausalLM",
     .sign = "layer_norm_epsilon",
     .defaults = R"({"hidden_size": 768, "num_hidden_layers": 32, "layer_norm_epsilon": 1e-5, "use_mlp": false,
                     "hidden_act": "silu", "initializer_range": 0.1, "vocab_size": 50280, "bos_token_id": 0,
                     "eos_token_id": 0, "tie_word_embeddings": true})",
     .keys = kHfKeysOfMamba,
     .refused = kRefusedOfMamba,
     .without_effect = kWithoutEffectOnMamba,
     .names = kBackboneNames,
     .older_names = kOlderBackboneNames,
     .closed = true}};

constexpr PresetRow kMambaPresets[] = {
    {"mamba-1.3b", "the paper's 1.3B Mamba", R"({"hidden_size": 2048, "num_hidden_layers": 48})"},
    {"mamba-350m", "the paper's 350M Mamba, tied embeddings",
     R"({"hidden_size": 1024, "num_hidden_layers": 48, "tie_word_embeddings": true})"},
};

}  // namespace

constinit const Registration kMamba{"mamba", "Mamba (Gu and Dao 2023)",
                                    []() -> std::unique_ptr<Config> { return std::make_unique<MambaConfig>(); },
                                    kMambaLayouts, kMambaPresets};

}  // namespace flashgla::mixers
