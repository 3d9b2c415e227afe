// Gates over values by chunks: bf16 (value_gates/README.md). Workspace from context.scratch().
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/params.h"
#include "flashgla/ops/gated_linear_attention/implementations.h"

namespace flashgla::ops::gated_linear_attention::cuda {

// Whether the call goes this way. Its rows are aligned then (aligned_rows.h).
bool gates_values_by_chunks(const Problem& problem);

// The keys' side (q, k, g) and the values' side (do, v, gv) of a call as problems of gates over keys.
Params keys_of(const Params& params);
Params values_of(const Params& params, const Strided& d_o);

// Bytes of Outputs.states.
std::size_t value_gates_states_bytes(const Problem& problem);

void forward_with_value_gates(Context& context, const Problem& problem, const Inputs& inputs, const Outputs& outputs,
                              bool hopper);
void backward_with_value_gates(Context& context, const Problem& problem, const Inputs& inputs, const Outputs& outputs,
                               const OutputGradients& d_out, const InputGradients& d_in, bool hopper);

}  // namespace flashgla::ops::gated_linear_attention::cuda
