// RWKV-4's two parts of a block (Peng et al. 2023, "RWKV: Reinventing RNNs for the Transformer Era", section 3;
// parameters as in transformers' checkpoints). x' is x one token before, E attention_hidden_size, mu_* are time_mix_*.
//
//     time mix       k = W_k (mu_k x + (1 - mu_k) x'), v and r likewise          E channels each
//                    y = W_o wkv(k, v, r; time_decay, time_first)                sigmoid(r) within
//     channel mix    k = W_k (mu_k x + (1 - mu_k) x'), r likewise                of the width of an MLP, and D
//                    y = sigmoid(r) * W_v max(k, 0)^2
//
// The first is the mixer, the second stands in the place of the block's MLP.
#pragma once

#include "flashgla/mixers/registry.h"

namespace flashgla::mixers {

extern const Registration kRwkv;

}  // namespace flashgla::mixers
