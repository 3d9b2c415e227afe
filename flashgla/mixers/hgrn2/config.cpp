#include "flashgla/mixers/hgrn2/config.h"

#include "flashgla/mixers/hgrn2/hgrn2.h"
#include "flashgla/mixers/mixer.h"

namespace flashgla::mixers {

std::vector<Field> Hgrn2Config::fields() {
  return {{"num_heads", &num_heads},
          {"expand_ratio", &expand_ratio},
          {"use_short_conv", &use_short_conv},
          {"conv_size", &conv_size},
          {"use_lower_bound", &use_lower_bound}};
}

void Hgrn2Config::settle(const Common& common) {
  num_heads = heads(common);
  expand_ratio = common.hidden_size / *num_heads;
}

void Hgrn2Config::validate(const Common& common) const {
  const auto divides = [&](const char* field, const std::optional<std::int64_t>& value) {
    if (!value) return;
    require_size(field, *value, common.hidden_size);
    require(common.hidden_size % *value == 0, field, std::to_string(*value),
            "a divisor of hidden_size " + std::to_string(common.hidden_size));
  };
  require(expand_ratio || num_heads, "expand_ratio", "null", "a number, or num_heads to be one");
  divides("expand_ratio", expand_ratio);
  if (!expand_ratio) divides("num_heads", num_heads);
  if (use_short_conv) require_width("conv_size", conv_size);
}

namespace {

constexpr Renaming kHgrn2OlderKeys[] = {{"norm_eps", "rms_norm_eps"}};
constexpr Refusal kHgrn2Refused[] = {{"elementwise_affine", "true"}};

constexpr Layout kHgrn2Layouts[] = {{.name = "fla",
                                     .model_type = "hgrn2",
                                     .architecture = "HGRN2ForCausalLM",
                                     .older_keys = kHgrn2OlderKeys,
                                     .refused = kHgrn2Refused}};

constexpr PresetRow kHgrn2Presets[] = {
    {"hgrn2-1.3b", "HGRN2 of the 1.3B size", R"({"hidden_size": 2048, "num_hidden_layers": 24})"},
};

}  // namespace

constinit const Registration kHgrn2{"hgrn2", "HGRN2 (Qin et al. 2024)",
                                    []() -> std::unique_ptr<Config> { return std::make_unique<Hgrn2Config>(); },
                                    kHgrn2Layouts, kHgrn2Presets};

}  // namespace flashgla::mixers
