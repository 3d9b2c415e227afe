#include "flashgla/mixers/mamba2/config.h"

#include <iterator>
#include <span>

#include "flashgla/mixers/backbone_names.h"
#include "flashgla/mixers/mamba2/mamba2.h"
#include "flashgla/mixers/mixer.h"

namespace flashgla::mixers {

std::vector<Field> Mamba2Config::fields() {
  return {{"state_size", &state_size}, {"expand", &expand},
          {"head_dim", &head_dim},     {"num_heads", &num_heads},
          {"n_groups", &n_groups},     {"conv_kernel", &conv_kernel},
          {"use_bias", &use_bias},     {"use_conv_bias", &use_conv_bias}};
}

void Mamba2Config::settle(const Common& common) {
  if (!num_heads) num_heads = heads(common);
}

void Mamba2Config::validate(const Common& common) const {
  require_size("state_size", state_size, 1 << 16);
  require_size("expand", expand, 64);
  require_size("head_dim", head_dim, 1 << 16);
  const auto number = [](std::int64_t value) { return std::to_string(value); };
  require(inner(common) % head_dim == 0, "head_dim", number(head_dim),
          "a divisor of expand * hidden_size (" + number(inner(common)) + ")");
  require(!num_heads || *num_heads == heads(common), "num_heads", number(num_heads.value_or(0)),
          "expand * hidden_size / head_dim (" + number(heads(common)) + ")");
  require(n_groups > 0 && heads(common) % n_groups == 0, "n_groups", number(n_groups),
          "a divisor of the " + number(heads(common)) + " heads");
  require_width("conv_kernel", conv_kernel);
}

namespace {

// Limits of dt other than none, one D a channel and, last, a norm before the gate are not implemented. transformers
// does not look at the last (its norm is always behind the gate), and Codestral's config says true.
constexpr const char* kNoLimit = R"([0.0,"Infinity"]|[0,"Infinity"]|[0.0,{"__float__":"Infinity"}])";
constexpr Refusal kMamba2Refused[] = {{"dt_limit", kNoLimit},  {"time_step_limit", kNoLimit},
                                      {"D_has_hdim", "false"}, {"rmsnorm", "true"},
                                      {"rms_norm", "true"},    {"norm_before_gate", "false"}};
constexpr const char* kMamba2HfWithoutEffect[] = {"norm_before_gate"};

constexpr Renaming kMamba2Heads[] = {{"head_dim", "head_dim"}, {"num_heads", "num_heads"}, {"n_groups", "n_groups"}};
constexpr auto kMamba2HfKeys = joined(kBackboneKeys, kMamba2Heads);

constexpr Layout kMamba2Layouts[] = {
    {.name = "fla",
     .model_type = "mamba2",
     .architecture = "Mamba2ForCausalLM",
     .defaults = R"({"hidden_size": 2048, "num_hidden_layers": 48, "norm_eps": 1e-5, "use_mlp": false,
                     "hidden_act": "silu"})",
     .refused = kMamba2Refused,
     .names = kBackboneNames,
     .older_names = kOlderBackboneNames},
    {.name = "hf",
     .model_type = "mamba2",
     .architecture = "Mamba2ForCausalLM",
     .sign = "layer_norm_epsilon",
     .defaults = R"({"hidden_size": 4096, "num_hidden_layers": 64, "layer_norm_epsilon": 1e-5, "use_mlp": false,
                     "hidden_act": "silu", "initializer_range": 0.1, "vocab_size": 32768, "bos_token_id": 0,
                     "eos_token_id": 2, "n_groups": 8})",
     .keys = kMamba2HfKeys,
     .refused = std::span(kMamba2Refused).first<std::size(kMamba2Refused) - 1>(),
     .without_effect = kMamba2HfWithoutEffect,
     .names = kBackboneNames,
     .older_names = kOlderBackboneNames,
     .closed = true}};

constexpr PresetRow kMamba2Presets[] = {
    {"mamba2-1.3b", "Mamba-2 of the 1.3B size, 48 layers without MLPs",
     R"({"hidden_size": 2048, "num_hidden_layers": 48})"},
    {"mamba2-130m", "state-spaces' mamba2-130m with another tokenizer, tied embeddings",
     R"({"hidden_size": 768, "num_hidden_layers": 24, "tie_word_embeddings": true})"},
};

}  // namespace

constinit const Registration kMamba2{"mamba2", "Mamba-2 (Dao and Gu 2024)",
                                     []() -> std::unique_ptr<Config> { return std::make_unique<Mamba2Config>(); },
                                     kMamba2Layouts, kMamba2Presets};

}  // namespace flashgla::mixers
