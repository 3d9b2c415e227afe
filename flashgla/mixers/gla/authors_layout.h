// The layout in which the paper's authors released their models (github.com/berlino/gated_linear_attention):
//   - their keys are scaled by (D / heads)^-1/2 and their queries not: the ratio to our scale K^-1/2 goes into W_k;
//   - their norm of the heads' outputs is a LayerNorm without weight: the output is linear in v, so subtracting from
//     W_v the mean over each head's rows makes its outputs zero-mean, and RMSNorm does the rest (same epsilon, 1e-5);
//   - their output gate has a bias: GlaConfig::output_gate_bias;
//   - w1, w3 and w2 are the MLP's gate, up and down projections.
// Nothing is lost in reading. In writing W_k is scaled back, and W_v must have such means of 0, as one that was read
// has until it is trained further: LayerNorm and RMSNorm are the same then, and other models are refused. Their models
// with gates over values (use_gv) are refused.
#pragma once

#include "flashgla/mixers/registry.h"

namespace flashgla::mixers {

// Layout::convert of it: scales W_k, centres W_v.
void convert_from_authors(const Common& common, const Config& config, const std::string& name, const TensorView& value);
// Layout::convert_back: scales W_k, refuses a W_v that is not centred to bf16's precision.
void convert_to_authors(const Common& common, const Config& config, const std::string& name, const TensorView& value);

inline constexpr Renaming kGlaAuthorsKeys[] = {
    {"hidden_size", "d_model"},       {"num_heads", "n_head"},
    {"num_hidden_layers", "n_layer"}, {"max_position_embeddings", "context_length"},
    {"vocab_size", "vocab_size"},     {"bos_token_id", "bos_token_id"},
    {"eos_token_id", "eos_token_id"}, {"tie_word_embeddings", "tie_word_embeddings"}};
inline constexpr Refusal kGlaAuthorsRefused[] = {{"use_gk", "true"}, {"use_gv", "false"}};
inline constexpr Renaming kGlaAuthorsNames[] = {{"model.embeddings.", "transformer.wte."},
                                                {"model.norm.", "transformer.ln_f."},
                                                {"model.layers.", "transformer.h."},
                                                {".attn_norm.", ".ln_1."},
                                                {".attn.gk_proj.", ".attn.k_gate."},
                                                {".attn.o_proj.", ".attn.out_proj."},
                                                {".mlp_norm.", ".ln_2."},
                                                {".mlp.gate_proj.", ".w1."},
                                                {".mlp.up_proj.", ".w3."},
                                                {".mlp.down_proj.", ".w2."}};
inline constexpr Layout kGlaAuthorsLayout = {
    .name = "authors",
    .model_type = "transformer",
    .architecture = "",
    .sign = "n_layer",
    .defaults = R"({"d_model": 2048, "n_head": 8, "n_layer": 24, "vocab_size": 50432, "context_length": 2048,
                    "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": false, "norm_eps": 1e-5,
                    "elementwise_affine": false, "output_gate_bias": true})",
    .keys = kGlaAuthorsKeys,
    .refused = kGlaAuthorsRefused,
    .names = kGlaAuthorsNames,
    .closed = true,
    .constants = R"({"use_gk": true, "use_gv": false})",
    .convert = convert_from_authors,
    .convert_back = convert_to_authors};

}  // namespace flashgla::mixers
