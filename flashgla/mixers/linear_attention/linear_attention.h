// Linear attention without a gate (Katharopoulos et al. 2020, eq. 9; parameters as in flash-linear-attention's
// checkpoints).
//
//     q, k, v = W_q x, W_k x, W_v x
//     o       = phi(q)^T sum_{j <= i} phi(k_j) v_j^T, divided by phi(q) . sum phi(k_j) on wish
//     y       = W_o RMSNorm(o)                       RMSNorm per head
#pragma once

#include "flashgla/mixers/registry.h"

namespace flashgla::mixers {

extern const Registration kLinearAttention;

}  // namespace flashgla::mixers
