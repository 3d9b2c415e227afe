// Hyena's layer of order 2 (Poli et al. 2023, "Hyena Hierarchy: Towards Larger Convolutional Language Models", sections
// 3.1 to 3.3), as in zoology's code, whose names its parameters have.
//
//     (x1, x2, v) = conv(W_in u + b_in) + b           depthwise, causal, width 3, over 3 D channels
//     c = x1 v;   s = long_convolution(c, f, beta);   y = W_out (x2 s) + b_out
//     f_j = window(W_4 sin(a W_3' sin(a W_2' sin(a W_1' z_j))))       W' with biases; f of l_max rows
//
// z_j starts as (t, cos(w_j nu), -sin(w_j nu)), t = j / (l_max - 1), w_j = 2 pi j / l_max, nu = linspace(1e-4, n - 1,
// n) of n = (emb_dim - 1) / 2, and is trained; a is one vector for all three sines.
#pragma once

#include "flashgla/mixers/registry.h"

namespace flashgla::mixers {

extern const Registration kHyena;

}  // namespace flashgla::mixers
