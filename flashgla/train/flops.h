// Model FLOPs: what the mathematics of a training step needs, whatever is computed again.
#pragma once

#include "flashgla/model/config.h"

namespace flashgla::train {

// Of one token, forward and backward: 6 for each element of a matrix that multiplies activations (the embedding's
// look-up does not; a tied head does), and 12 K V + 2 C (4 K + 3 V) for each head of K key and V value channels with
// chunks of C = 64 (the operator's README).
double training_flops_per_token(const model::ModelConfig& config);

}  // namespace flashgla::train
