// Mamba-2's layer (Dao and Gu 2024, "Transformers are SSMs", section 7; parameters as in flash-linear-attention's and
// transformers' checkpoints). E = expand D channels in heads of V, K state channels, whose B and C a group of heads
// shares.
//
//     z, c, raw = W_in u                     E, E + 2 groups K and H channels
//     x, B, C   = silu(conv(c) + b)          causal, depthwise, one convolution for all
//     dt        = softplus(raw + dt_bias)
//     o         = gated_linear_attention(C, B, dt x, -exp(A_log) dt), scale 1
//     y         = W_out RMSNorm((o + D x) * silu(z))     RMSNorm over the channels of a group
#pragma once

#include "flashgla/mixers/registry.h"

namespace flashgla::mixers {

extern const Registration kMamba2;

}  // namespace flashgla::mixers
