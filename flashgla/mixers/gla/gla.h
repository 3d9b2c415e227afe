// The GLA layer (Yang et al. 2024, section 4.4; parameters as in flash-linear-attention's checkpoints).
//
//     q, k, v = W_q x, W_k x, W_v x                      each with a short convolution and SiLU when configured
//     g       = log_sigmoid(W_2 (W_1 x) + b) / 16        W_1 to gate_low_rank_dim channels; clamped from below on wish
//     o       = gated_linear_attention(q, k, v, g)       per head; kv_heads states shared by groups of query heads
//     y       = W_o (RMSNorm(o) * swish(W_g x))          RMSNorm per head; without the gate: W_o RMSNorm(o)
#pragma once

#include "flashgla/mixers/registry.h"

namespace flashgla::mixers {

extern const Registration kGla;
extern const Registration kGlaVariant;

}  // namespace flashgla::mixers
