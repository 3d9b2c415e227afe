// RetNet's multi-scale retention (Sun et al. 2023, section 2.2; parameters as in flash-linear-attention's checkpoints).
//
//     q, k, v = W_q x, W_k x, W_v x;   q, k = rope(q), rope(k)
//     o       = gated_linear_attention(q, k, v, g),   g = ln(1 - 2^(-5 - h)) of head h, fixed
//     y       = W_o (RMSNorm(o) * swish(W_g x))       RMSNorm per head
#pragma once

#include "flashgla/mixers/registry.h"

namespace flashgla::mixers {

extern const Registration kRetention;

}  // namespace flashgla::mixers
