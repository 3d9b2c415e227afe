// Mamba's layer (Gu and Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", section 3;
// parameters as in flash-linear-attention's and transformers' checkpoints). E = expand D channels of K states, R the
// rank of the steps' projection.
//
//     u, z      = W_in x                     E channels each
//     u         = silu(conv(u) + b)          causal, depthwise
//     r, B, C   = W_x u                      R, K and K channels: B and C are shared by all channels
//     raw       = W_dt r                     E channels
//     y         = selective_scan(u, raw, z, B, C; dt_bias, A_log, D)
//     output    = W_out y
#pragma once

#include "flashgla/mixers/registry.h"

namespace flashgla::mixers {

extern const Registration kMamba;

}  // namespace flashgla::mixers
