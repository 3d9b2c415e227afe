// How Mamba's and Mamba-2's checkpoints name what flash-linear-attention calls model.*: transformers' names, and those
// of state-spaces' own files where they differ.
#pragma once

#include "flashgla/mixers/registry.h"

namespace flashgla::mixers {

inline constexpr Renaming kBackboneNames[] = {{"model.embeddings.", "backbone.embeddings."},
                                              {"model.layers.", "backbone.layers."},
                                              {".attn_norm.", ".norm."},
                                              {".attn.", ".mixer."},
                                              {"model.norm.", "backbone.norm_f."}};
inline constexpr Renaming kOlderBackboneNames[] = {{"model.embeddings.", "backbone.embedding."}};

}  // namespace flashgla::mixers
