// Model FLOPs: what the mathematics of a training step needs, whatever is computed again.
#pragma once

#include "flashgla/model/config.h"

namespace flashgla::train {

// Of one token, forward and backward: 6 for each element of a matrix that multiplies activations (the embedding's
// look-up does not; a tied head does), and the operator's own for each head (ops/gated_linear_attention/flops.h).
double training_flops_per_token(const model::ModelConfig& config);

}  // namespace flashgla::train
