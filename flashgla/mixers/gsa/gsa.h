// Gated slot attention (Zhang et al. 2024, "Gated Slot Attention for Efficient Linear-Time Sequence Modeling";
// parameters as in flash-linear-attention's checkpoints). A head keeps M slots of a key and a value each.
//
//     q, k, v, f = W_q x, W_k x, W_v x, W_f x           q, k, v with a short convolution and SiLU when configured
//     g       = log_sigmoid(f) / 8;   s = 1 - e^g       of each slot
//     p       = softmax over slots of gated_linear_attention(silu(q), silu(k), s, gates of values g), scale 1
//     o       = gated_linear_attention(p, s, silu(v), gates of keys g), scale 1
//     y       = W_o RMSNorm(silu(o))                    RMSNorm over all channels
#pragma once

#include "flashgla/mixers/registry.h"

namespace flashgla::mixers {

extern const Registration kGsa;

}  // namespace flashgla::mixers
