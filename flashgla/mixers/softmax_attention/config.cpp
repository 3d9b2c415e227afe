#include "flashgla/mixers/softmax_attention/config.h"

#include <cmath>

#include "flashgla/mixers/softmax_attention/softmax_attention.h"

namespace flashgla::mixers {

std::vector<Field> SoftmaxAttentionConfig::fields() {
  return {{"num_heads", &num_heads},     {"num_kv_heads", &num_kv_heads},
          {"head_dim", &head_dim},       {"qkv_bias", &qkv_bias},
          {"o_bias", &o_bias},           {"qk_norm", &qk_norm},
          {"window_size", &window_size}, {"use_rope", &use_rope},
          {"rope_theta", &rope_theta}};
}

void SoftmaxAttentionConfig::validate(const Common& common) const {
  require_size("num_heads", num_heads, common.hidden_size);
  require_kv_heads(num_kv_heads, num_heads);
  if (head_dim) {
    require_size("head_dim", *head_dim, 1024);
  } else {
    require(common.hidden_size % num_heads == 0, "num_heads", std::to_string(num_heads),
            "a divisor of hidden_size " + std::to_string(common.hidden_size) + ", or head_dim to be given");
  }
  const std::int64_t channels = head_channels(common);
  require(channels % 2 == 0 && channels <= 1024, head_dim ? "head_dim" : "num_heads",
          std::to_string(head_dim ? channels : num_heads), "heads of an even number of channels, at most 1024");
  if (window_size) require_size("window_size", *window_size, 1 << 30);
  require(std::isfinite(rope_theta) && rope_theta > 1.0, "rope_theta", std::to_string(rope_theta), "more than 1");
}

namespace {

constexpr Renaming kSoftmaxOlderKeys[] = {{"norm_eps", "rms_norm_eps"}, {"qkv_bias", "attention_bias"}};
constexpr Refusal kFlaRefused[] = {{"attnres_block_size", ""}, {"elementwise_affine", "true"}};

constexpr Renaming kHfKeys[] = {{"hidden_size", "hidden_size"},
                                {"num_hidden_layers", "num_hidden_layers"},
                                {"intermediate_size", "intermediate_size"},
                                {"hidden_act", "hidden_act"},
                                {"norm_eps", "rms_norm_eps"},
                                {"tie_word_embeddings", "tie_word_embeddings"},
                                {"initializer_range", "initializer_range"},
                                {"vocab_size", "vocab_size"},
                                {"bos_token_id", "bos_token_id"},
                                {"eos_token_id", "eos_token_id"},
                                {"max_position_embeddings", "max_position_embeddings"},
                                {"num_heads", "num_attention_heads"},
                                {"num_kv_heads", "num_key_value_heads"},
                                {"head_dim", "head_dim"},
                                {"rope_theta", "rope_theta"},
                                {"rope_theta", "rope_parameters.rope_theta"}};  // transformers 5
constexpr Renaming kLlamaBiases[] = {{"qkv_bias", "attention_bias"}, {"o_bias", "attention_bias"}};
constexpr Renaming kMistralWindow[] = {{"window_size", "sliding_window"}};
constexpr auto kLlamaKeys = joined(kHfKeys, kLlamaBiases);
constexpr auto kMistralKeys = joined(kHfKeys, kMistralWindow);
constexpr Refusal kHfRefused[] = {{"rope_scaling", ""},
                                  {"rope_parameters.rope_type", "\"default\""},
                                  {"partial_rotary_factor", "1.0"},
                                  {"rope_interleaved", "false"},
                                  {"mlp_bias", "false"}};
constexpr Renaming kHfNames[] = {{"model.embeddings.", "model.embed_tokens."},
                                 {".attn_norm.", ".input_layernorm."},
                                 {".attn.", ".self_attn."},
                                 {".mlp_norm.", ".post_attention_layernorm."}};
constexpr const char* kIgnored[] = {".rotary_emb.inv_freq"};  // of old files

constexpr Layout kSoftmaxLayouts[] = {
    {.name = "fla",
     .model_type = "transformer",
     .architecture = "TransformerForCausalLM",
     .older_keys = kSoftmaxOlderKeys,
     .refused = kFlaRefused},
    {.name = "hf",
     .model_type = "llama",
     .architecture = "LlamaForCausalLM",
     .defaults = R"({"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 11008, "hidden_act": "silu"})",
     .keys = kLlamaKeys,
     .refused = kHfRefused,
     .names = kHfNames,
     .ignored = kIgnored,
     .closed = true},
    {.name = "mistral",
     .model_type = "mistral",
     .architecture = "MistralForCausalLM",
     .defaults = R"({"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "hidden_act": "silu",
                     "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096})",
     .keys = kMistralKeys,
     .refused = kHfRefused,
     .names = kHfNames,
     .ignored = kIgnored,
     .closed = true},
};

constexpr PresetRow kSoftmaxPresets[] = {
    {"transformer-tiny", "0.8M parameters, byte level: minutes on two cores",
     R"({"hidden_size": 128, "num_hidden_layers": 4, "num_heads": 4, "intermediate_size": 320,
         "initializer_range": 0.05, "tie_word_embeddings": true, "vocab_size": 258, "bos_token_id": 256,
         "eos_token_id": 257})"},
    {"transformer-small", "7M parameters, byte level: an evening on two cores",
     R"({"hidden_size": 256, "num_hidden_layers": 8, "num_heads": 4, "intermediate_size": 768,
         "tie_word_embeddings": true, "vocab_size": 258, "bos_token_id": 256, "eos_token_id": 257})"},
    {"transformer-340m", "the paper's 340M Transformer++, tied embeddings",
     R"({"hidden_size": 1024, "num_hidden_layers": 24, "num_heads": 16, "tie_word_embeddings": true})"},
    {"transformer-1.3b", "the paper's 1.3B Transformer++",
     R"({"hidden_size": 2048, "num_hidden_layers": 24, "num_heads": 32})"},
};

}  // namespace

constinit const Registration kSoftmaxAttention{
    "transformer",
    "softmax attention: Transformer++, LLaMA, Mistral",
    []() -> std::unique_ptr<Config> { return std::make_unique<SoftmaxAttentionConfig>(); },
    kSoftmaxLayouts,
    kSoftmaxPresets,
    "attn"};

}  // namespace flashgla::mixers
