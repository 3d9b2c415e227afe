#include "flashgla/mixers/rwkv/config.h"

#include <cmath>

#include "flashgla/mixers/mixer.h"
#include "flashgla/mixers/rwkv/rwkv.h"

namespace flashgla::mixers {

std::vector<Field> RwkvConfig::fields() {
  return {{"attention_hidden_size", &attention_hidden_size}, {"zero_init", &zero_init}};
}

void RwkvConfig::settle(const Common& common) {
  if (!attention_hidden_size) attention_hidden_size = common.hidden_size;
}

void RwkvConfig::validate(const Common& common) const { require_size("attention_hidden_size", inner(common), 1 << 20); }

double RwkvConfig::deviation(const Common& common) const {
  return zero_init ? 1.0 / std::sqrt(static_cast<double>(common.hidden_size)) : common.initializer_range;
}

RwkvDepth::RwkvDepth(const Common& common, std::int64_t layer) {
  const auto layers = static_cast<double>(common.num_hidden_layers);
  up = static_cast<double>(layer) / std::max(layers - 1.0, 1.0);
  down = 1.0 - static_cast<double>(layer) / layers;
}

nn::Parameter rwkv_mix(const std::string& name, std::int64_t hidden, double power, double shift) {
  nn::Parameter mix;
  mix.name = name;
  mix.shape = Shape({1, 1, hidden});
  mix.initialization = nn::Initialization::by_column;
  mix.column = [=](std::int64_t channel) {
    return std::pow(static_cast<double>(channel) / static_cast<double>(hidden), power) + shift;
  };
  mix.decay = false;
  mix.multiplied = false;
  return mix;
}

TensorView rwkv_mixes(const std::vector<const nn::Parameter*>& vectors, bool gradients) {
  std::vector<TensorView> rows;
  rows.reserve(vectors.size());
  for (const nn::Parameter* vector : vectors) {
    rows.push_back((gradients ? vector->gradient : vector->value).reshape(Shape({1, vector->shape[-1]})));
  }
  return nn::adjacent_rows(rows);
}

namespace {

// Those of transformers. RWKV-LM's: emb, blocks.N.{ln0, ln1, att, ln2, ffn}, ln_out, head.
constexpr Renaming kRwkvNames[] = {{"model.embeddings.", "rwkv.embeddings."},
                                   {"model.embedding_norm.", "rwkv.blocks.0.pre_ln."},
                                   {"model.layers.", "rwkv.blocks."},
                                   {".attn_norm.", ".ln1."},
                                   {".attn.", ".attention."},
                                   {".mlp_norm.", ".ln2."},
                                   {".mlp.", ".feed_forward."},
                                   {"model.norm.", "rwkv.ln_out."},
                                   {"lm_head.", "head."}};
constexpr Renaming kAuthorsNames[] = {{"model.embeddings.", "emb."},
                                      {"model.embedding_norm.", "blocks.0.ln0."},
                                      {"model.layers.", "blocks."},
                                      {".attn_norm.", ".ln1."},
                                      {".attn.", ".att."},
                                      {".mlp_norm.", ".ln2."},
                                      {".mlp.", ".ffn."},
                                      {".time_mix_key", ".time_mix_k"},
                                      {".time_mix_value", ".time_mix_v"},
                                      {".time_mix_receptance", ".time_mix_r"},
                                      {"model.norm.", "ln_out."},
                                      {"lm_head.", "head."}};

constexpr Renaming kRwkvHfKeys[] = {{"hidden_size", "hidden_size"},
                                    {"num_hidden_layers", "num_hidden_layers"},
                                    {"intermediate_size", "intermediate_size"},
                                    {"norm_eps", "layer_norm_epsilon"},
                                    {"tie_word_embeddings", "tie_word_embeddings"},
                                    {"vocab_size", "vocab_size"},
                                    {"bos_token_id", "bos_token_id"},
                                    {"eos_token_id", "eos_token_id"},
                                    {"max_position_embeddings", "context_length"},
                                    {"attention_hidden_size", "attention_hidden_size"}};
constexpr Renaming kAuthorsKeys[] = {
    {"hidden_size", "n_embd"},    {"num_hidden_layers", "n_layer"},       {"intermediate_size", "dim_ffn"},
    {"vocab_size", "vocab_size"}, {"max_position_embeddings", "ctx_len"}, {"attention_hidden_size", "dim_att"}};
constexpr Refusal kAuthorsRefused[] = {{"head_qk", "0"}, {"tiny_att_dim", "0|-1"}, {"pre_ffn", "0"}};

constexpr Layout kRwkvLayouts[] = {
    {.name = "own",
     .model_type = "rwkv",
     .architecture = "RwkvForCausalLM",
     .defaults = R"({"norm_eps": 1e-5, "norm_type": "layer_norm", "embedding_norm": true})",
     .names = kRwkvNames},
    {.name = "hf",
     .model_type = "rwkv",
     .architecture = "RwkvForCausalLM",
     .sign = "layer_norm_epsilon",
     .defaults = R"({"hidden_size": 4096, "num_hidden_layers": 32, "layer_norm_epsilon": 1e-5,
                     "norm_type": "layer_norm", "embedding_norm": true, "vocab_size": 50277, "bos_token_id": 0,
                     "eos_token_id": 0, "context_length": 1024})",
     .keys = kRwkvHfKeys,
     .names = kRwkvNames,
     .closed = true},
    {.name = "authors",
     .model_type = "rwkv",
     .architecture = "RWKV",
     .sign = "n_embd",
     .defaults = R"({"norm_eps": 1e-5, "norm_type": "layer_norm", "embedding_norm": true, "vocab_size": 50277,
                     "bos_token_id": 0, "eos_token_id": 0, "ctx_len": 1024})",
     .keys = kAuthorsKeys,
     .refused = kAuthorsRefused,
     .names = kAuthorsNames,
     .closed = true}};

constexpr PresetRow kRwkvPresets[] = {
    {"rwkv-169m", "RWKV-4 169M", R"({"hidden_size": 768, "num_hidden_layers": 12, "vocab_size": 50277,
                                    "bos_token_id": 0, "eos_token_id": 0})"},
    {"rwkv-1b5", "RWKV-4 1.5B", R"({"hidden_size": 2048, "num_hidden_layers": 24, "vocab_size": 50277,
                                   "bos_token_id": 0, "eos_token_id": 0})"},
};

}  // namespace

constinit const Registration kRwkv{"rwkv", "RWKV-4 (Peng et al. 2023): time mix and channel mix",
                                   []() -> std::unique_ptr<Config> { return std::make_unique<RwkvConfig>(); },
                                   kRwkvLayouts, kRwkvPresets};

}  // namespace flashgla::mixers
