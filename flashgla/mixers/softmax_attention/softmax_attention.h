// Softmax attention, the token mixer of Transformers (Transformer++, LLaMA, Mistral).
//
//     q, k, v = W_q x, W_k x, W_v x         H, G, G heads of K channels; biases and an RMSNorm of q's and k's heads on
//     wish q, k    = rope(q), rope(k)            by position in the sequence y       = W_o softmax_attention(q, k, v)
//
// State: keys after rope and values of all tokens, growing; with a window of W tokens the last W, a ring.
#pragma once

#include "flashgla/mixers/registry.h"

namespace flashgla::mixers {

extern const Registration kSoftmaxAttention;

}  // namespace flashgla::mixers
