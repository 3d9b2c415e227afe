// Gates over values by chunks: bf16 (value_gates/README.md). Workspace from context.scratch().
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/plan.h"
#include "flashgla/ops/gated_linear_attention/implementations.h"

namespace flashgla::ops::gated_linear_attention::cuda {

// The keys' side (q, k, g) and the values' side (do, v, gv) of a call as problems of gates over keys.
Params keys_of(const Params& params);
Params values_of(const Params& params, const Strided& d_o);

// params as plan_chunks leaves them.
template <class Core>
void forward_with_value_gates(Context& context, const Plan& plan, const Params& params);
template <class Core>
void backward_with_value_gates(Context& context, const Plan& plan, const Params& params, const OutputGradients& d_out,
                               const InputGradients& d_in);

}  // namespace flashgla::ops::gated_linear_attention::cuda
