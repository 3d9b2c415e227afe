// HGRN2's layer (Qin et al. 2024, "HGRN2: Gated Linear RNNs with State Expansion"; parameters as in
// flash-linear-attention's checkpoints). D / expand_ratio heads of expand_ratio key channels.
//
//     q, f, i = W_q x, W_f x, W_i x                    each with a short convolution when configured
//     g       = ln(b + (1 - b) sigmoid(f))             b: the layer's lower bound, of all layers' `model.lower_bounds`
//     o       = gated_linear_attention(silu(q), 1 - e^g, i, g)
//     y       = W_o RMSNorm(o)                         RMSNorm over all channels
#pragma once

#include "flashgla/mixers/registry.h"

namespace flashgla::mixers {

extern const Registration kHgrn2;

}  // namespace flashgla::mixers
