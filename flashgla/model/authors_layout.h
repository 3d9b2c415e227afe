// The layout in which the paper's authors released their models (github.com/berlino/gated_linear_attention), which
// load_model turns into ours:
//   - their keys are scaled by (D / heads)^-1/2 and their queries not: the ratio to our scale K^-1/2 goes into W_k;
//   - their norm of the heads' outputs is a LayerNorm without weight: the output is linear in v, so subtracting from
//   W_v
//     the mean over each head's rows makes its outputs zero-mean, and RMSNorm does the rest (same epsilon, 1e-5);
//   - their output gate has a bias: ModelConfig::output_gate_bias;
//   - w1, w3 and w2 are the MLP's gate, up and down projections.
// Nothing is lost. The other way is not offered: a model of ours fits theirs only if its W_v happens to be centred.
// Their models with gates over values (use_gv) are not supported.
#pragma once

#include <memory>
#include <string>

#include "flashgla/model/checkpoint.h"

namespace flashgla::model {

// Whether the text of a config.json is the authors' ("d_model", "n_layer").
bool is_authors_config(const std::string& json);

// Throws Error naming `source` and the field.
ModelConfig parse_authors_config(const std::string& json, const std::string& source);

// Fills the model, made from parse_authors_config's result. Throws Error naming the tensor that is missing, left over
// or of another shape.
void load_authors_weights(const Weights& weights, LanguageModel& model);

}  // namespace flashgla::model
