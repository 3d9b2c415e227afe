// How Mamba's and Mamba-2's checkpoints name what flash-linear-attention calls model.*: transformers' names, and those
// of state-spaces' own files where they differ; and transformers' keys of config.json that both have.
#pragma once

#include "flashgla/mixers/registry.h"

namespace flashgla::mixers {

inline constexpr Renaming kBackboneNames[] = {{"model.embeddings.", "backbone.embeddings."},
                                              {"model.layers.", "backbone.layers."},
                                              {".attn_norm.", ".norm."},
                                              {".attn.", ".mixer."},
                                              {"model.norm.", "backbone.norm_f."}};
inline constexpr Renaming kOlderBackboneNames[] = {{"model.embeddings.", "backbone.embedding."}};
inline constexpr Renaming kBackboneKeys[] = {{"hidden_size", "hidden_size"},
                                             {"num_hidden_layers", "num_hidden_layers"},
                                             {"norm_eps", "layer_norm_epsilon"},
                                             {"hidden_act", "hidden_act"},
                                             {"tie_word_embeddings", "tie_word_embeddings"},
                                             {"initializer_range", "initializer_range"},
                                             {"vocab_size", "vocab_size"},
                                             {"bos_token_id", "bos_token_id"},
                                             {"eos_token_id", "eos_token_id"},
                                             {"state_size", "state_size"},
                                             {"expand", "expand"},
                                             {"conv_kernel", "conv_kernel"},
                                             {"use_bias", "use_bias"},
                                             {"use_conv_bias", "use_conv_bias"}};

}  // namespace flashgla::mixers
