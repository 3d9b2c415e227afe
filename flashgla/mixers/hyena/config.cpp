#include "flashgla/mixers/hyena/config.h"

#include <cmath>

#include "flashgla/mixers/hyena/hyena.h"
#include "flashgla/mixers/mixer.h"

namespace flashgla::mixers {

std::vector<Field> HyenaConfig::fields() {
  return {{"l_max", &l_max}, {"filter_order", &filter_order}, {"emb_dim", &emb_dim}, {"w", &w}, {"shift", &shift}};
}

void HyenaConfig::validate(const Common&) const {
  require(l_max >= 2 && l_max <= 1 << 24, "l_max", std::to_string(l_max), "2 to " + std::to_string(1 << 24));
  require_size("filter_order", filter_order, 1 << 16);
  require(emb_dim >= 3 && emb_dim % 2 == 1 && emb_dim < 1 << 12, "emb_dim", std::to_string(emb_dim),
          "an odd number from 3 on");
  require(std::isfinite(w), "w", std::to_string(w), "a number");
  require(std::isfinite(shift), "shift", std::to_string(shift), "a number");
}

namespace {

// What the authors' operators can be told and this one cannot.
constexpr Refusal kHyenaRefused[] = {{"order", "2"},
                                     {"num_inner_mlps", "2"},
                                     {"num_heads", "1"},
                                     {"num_blocks", "1"},
                                     {"inner_factor", "1"},
                                     {"outer_mixing", "false"},
                                     {"short_filter_order", "3"},
                                     {"modulate", "true"},
                                     {"filter_dropout", "0.0|0"},
                                     {"activation", "\"id\""}};

constexpr Layout kHyenaLayouts[] = {
    {.name = "own", .model_type = "hyena", .architecture = "HyenaForCausalLM", .refused = kHyenaRefused}};

constexpr PresetRow kHyenaPresets[] = {
    {"hyena-340m", "Hyena in the frame of the paper's 340M models",
     R"({"hidden_size": 1024, "num_hidden_layers": 24, "tie_word_embeddings": true})"}};

}  // namespace

constinit const Registration kHyena{"hyena", "Hyena (Poli et al. 2023), of order 2",
                                    []() -> std::unique_ptr<Config> { return std::make_unique<HyenaConfig>(); },
                                    kHyenaLayouts, kHyenaPresets};

}  // namespace flashgla::mixers
