#include <string_view>
#include <utility>

#include "flashgla/mixers/gated_layer.h"
#include "flashgla/mixers/linear_attention/linear_attention.h"

namespace flashgla::mixers {

namespace {

using Map = HeadMapSettings::Kind;

Map map_from_name(const std::string& name) {
  constexpr std::pair<std::string_view, Map> kMaps[] = {
      {"identity", Map::as_is}, {"relu", Map::relu},         {"elu", Map::elu},
      {"t2r", Map::t2r},        {"hedgehog", Map::hedgehog}, {"elementwise_product", Map::elementwise_product},
      {"dpfp", Map::dpfp}};
  std::string known;
  for (const auto& [of, map] : kMaps) {
    if (name == of) return map;
    known += (known.empty() ? "'" : ", '") + std::string(of) + "'";
  }
  require(false, "feature_map", "'" + name + "'", "one of " + known);
  return Map::as_is;
}

struct LinearAttentionConfig : ConfigOf<LinearAttentionConfig> {
  double expand_k = 1.0;
  double expand_v = 1.0;
  std::int64_t num_heads = 4;
  std::optional<std::int64_t> num_kv_heads;  // absent: num_heads
  std::string feature_map = "elementwise_product";
  bool tie_feature_map_qk = false;
  bool norm_q = false;  // divided by the sum of its features
  bool norm_k = false;
  bool norm_feature_map = false;   // the normaliser
  bool elementwise_affine = true;  // the norm of the heads' outputs has a weight

  std::vector<Field> fields() override {
    return {{"expand_k", &expand_k},
            {"expand_v", &expand_v},
            {"num_heads", &num_heads},
            {"num_kv_heads", &num_kv_heads},
            {"feature_map", &feature_map},
            {"tie_feature_map_qk", &tie_feature_map_qk},
            {"norm_q", &norm_q},
            {"norm_k", &norm_k},
            {"norm_feature_map", &norm_feature_map},
            {"elementwise_affine", &elementwise_affine}};
  }

  std::int64_t kv_heads() const { return num_kv_heads.value_or(num_heads); }

  void validate(const Common& common) const override {
    require_heads(common, num_heads, expand_k, expand_v);
    require_kv_heads(num_kv_heads, num_heads);
    map_from_name(feature_map);
  }

  std::unique_ptr<Mixer> create(const Common& common, std::int64_t layer) const override {
    using OfOperator = ops::gated_linear_attention::FeatureMap;
    GatedLayerSettings settings;
    settings.common = common;
    settings.name = layer_prefix(layer) + ".attn";
    settings.num_heads = num_heads;
    settings.kv_heads = kv_heads();
    settings.key_dim = expanded(common, expand_k);
    settings.value_dim = expanded(common, expand_v);
    const Map map = map_from_name(feature_map);
    const bool by_operator = map == Map::as_is || map == Map::relu || map == Map::elu;
    if (!by_operator || norm_q || norm_k) {
      settings.head_map = {map, tie_feature_map_qk, norm_q, norm_k};
    } else {
      settings.feature_map = map == Map::elu    ? OfOperator::elu_plus_one
                             : map == Map::relu ? OfOperator::relu
                                                : OfOperator::identity;
    }
    settings.normalize = norm_feature_map;
    if (elementwise_affine) settings.norm_name = ".norm.weight";
    return make_gated_layer(settings);
  }
};

// A map that queries and keys share is one module with two names there, of which a checkpoint has one or the other.
constexpr Renaming kLinearOlderNames[] = {{".feature_map_q.", ".feature_map_k."}};

constexpr Layout kLinearLayouts[] = {{.name = "fla",
                                      .model_type = "linear_attn",
                                      .architecture = "LinearAttentionForCausalLM",
                                      .older_names = kLinearOlderNames}};

constexpr PresetRow kLinearPresets[] = {
    {"linear-attention-1.3b", "linear attention with elu + 1 and the normaliser",
     R"({"hidden_size": 2048, "num_hidden_layers": 24, "num_heads": 4, "feature_map": "elu",
         "norm_feature_map": true})"},
};

}  // namespace

constinit const Registration kLinearAttention{
    "linear_attn", "linear attention (Katharopoulos et al. 2020)",
    []() -> std::unique_ptr<Config> { return std::make_unique<LinearAttentionConfig>(); }, kLinearLayouts,
    kLinearPresets};

}  // namespace flashgla::mixers
