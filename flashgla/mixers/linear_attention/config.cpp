#include "flashgla/mixers/gated_layer.h"
#include "flashgla/mixers/linear_attention/linear_attention.h"

namespace flashgla::mixers {

namespace {

namespace attention = ops::gated_linear_attention;

struct LinearAttentionConfig : ConfigOf<LinearAttentionConfig> {
  double expand_k = 1.0;
  double expand_v = 1.0;
  std::int64_t num_heads = 4;
  std::string feature_map = "identity";  // "identity", "relu", "elu"
  bool norm_feature_map = false;         // the normaliser

  std::vector<Field> fields() override {
    return {{"expand_k", &expand_k},
            {"expand_v", &expand_v},
            {"num_heads", &num_heads},
            {"feature_map", &feature_map},
            {"norm_feature_map", &norm_feature_map}};
  }

  attention::FeatureMap map() const {
    if (feature_map == "identity") return attention::FeatureMap::identity;
    if (feature_map == "relu") return attention::FeatureMap::relu;
    require(feature_map == "elu", "feature_map", "'" + feature_map + "'", "'identity', 'relu' or 'elu'");
    return attention::FeatureMap::elu_plus_one;
  }

  void validate(const Common& common) const override {
    require_heads(common, num_heads, expand_k, expand_v);
    map();
  }

  std::unique_ptr<Mixer> create(const Common& common, std::int64_t layer) const override {
    GatedLayerSettings settings;
    settings.common = common;
    settings.name = layer_prefix(layer) + ".attn";
    settings.num_heads = settings.kv_heads = num_heads;
    settings.key_dim = expanded(common, expand_k);
    settings.value_dim = expanded(common, expand_v);
    settings.feature_map = map();
    settings.normalize = norm_feature_map;
    settings.norm_name = ".norm.weight";
    return make_gated_layer(settings);
  }
};

// Feature maps with parameters, and queries and keys divided by their sums, are not implemented:
// flash-linear-attention's default, "elementwise_product", is what an absent feature_map stands for, and is refused by
// name.
constexpr Refusal kRefused[] = {{"num_kv_heads", ""}, {"norm_q", "false"}, {"norm_k", "false"}};

constexpr Layout kLayouts[] = {
    {.name = "fla", .model_type = "linear_attn", .architecture = "LinearAttentionForCausalLM", .refused = kRefused}};

constexpr PresetRow kPresets[] = {
    {"linear-attention-1.3b", "linear attention with elu + 1 and the normaliser",
     R"({"hidden_size": 2048, "num_hidden_layers": 24, "num_heads": 4, "feature_map": "elu",
         "norm_feature_map": true})"},
};

}  // namespace

constinit const Registration kLinearAttention{
    "linear_attn", "linear attention (Katharopoulos et al. 2020)",
    []() -> std::unique_ptr<Config> { return std::make_unique<LinearAttentionConfig>(); }, kLayouts, kPresets};

}  // namespace flashgla::mixers
