#include "flashgla/mixers/gsa/config.h"

#include <cmath>

#include "flashgla/mixers/gated_layer.h"
#include "flashgla/mixers/gsa/gsa.h"
#include "flashgla/mixers/mixer.h"

namespace flashgla::mixers {

std::vector<Field> GsaConfig::fields() {
  return {{"num_heads", &num_heads},
          {"num_kv_heads", &num_kv_heads},
          {"num_slots", &num_slots},
          {"expand_k", &expand_k},
          {"use_short_conv", &use_short_conv},
          {"conv_size", &conv_size},
          {"gate_logit_normalizer", &gate_logit_normalizer}};
}

void GsaConfig::validate(const Common& common) const {
  require_heads(common, num_heads, expand_k, 1.0);
  require_kv_heads(num_kv_heads, num_heads);
  require_size("num_slots", num_slots, 1 << 16);
  if (use_short_conv) require_width("conv_size", conv_size);
  require(std::isfinite(gate_logit_normalizer) && gate_logit_normalizer > 0.0, "gate_logit_normalizer",
          std::to_string(gate_logit_normalizer), "a positive number");
}

namespace {

// flash-linear-attention's config reads these keys, and writes expand_k and expand_v.
constexpr Renaming kGsaOlderKeys[] = {{"norm_eps", "rms_norm_eps"}, {"expand_k", "exapnd_k"}};
// Its norm has hidden_size channels, whatever the values have.
constexpr Refusal kGsaRefused[] = {
    {"expand_v", "1|1.0"}, {"exapnd_v", "1|1.0"}, {"feature_map", "\"swish\""},   {"clamp_min", ""},
    {"clamp_max", ""},     {"use_norm", "true"},  {"elementwise_affine", "true"}, {"use_output_gate", "false"}};

constexpr Layout kGsaLayouts[] = {{.name = "fla",
                                   .model_type = "gsa",
                                   .architecture = "GSAForCausalLM",
                                   .older_keys = kGsaOlderKeys,
                                   .refused = kGsaRefused}};

constexpr PresetRow kGsaPresets[] = {
    {"gsa-1.3b", "gated slot attention of the 1.3B size, 64 slots",
     R"({"hidden_size": 2048, "num_hidden_layers": 24, "num_heads": 4})"},
};

}  // namespace

constinit const Registration kGsa{"gsa", "gated slot attention (Zhang et al. 2024)",
                                  []() -> std::unique_ptr<Config> { return std::make_unique<GsaConfig>(); },
                                  kGsaLayouts, kGsaPresets};

}  // namespace flashgla::mixers
