// What a model's mathematics needs, whatever is computed again: the one place that utilisation, benches and `info`
// read.
#pragma once

#include "flashgla/mixers/mixer.h"
#include "flashgla/model/config.h"

namespace flashgla::model {

// Of one token in a sequence of `length`: 2 FLOPs forward and 6 forward and backward for each element of a matrix that
// multiplies activations (the embedding's look-up does not; a tied head does), and what each mixer says of itself.
// decode_bytes: states alone; weights come once for all sequences of a batch.
mixers::Cost cost(const ModelConfig& config, std::int64_t length);

}  // namespace flashgla::model
