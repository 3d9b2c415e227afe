// Scalar gates where all heads have the same q and k, and dq and dk are sums over the heads (Options::sums_over_heads):
// Mamba-2. README.md has the kernels.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/plan.h"

namespace flashgla::ops::gated_linear_attention::cuda {

// Rows of every tensor are multiples of 16 bytes; Error where they are not. Workspace from context.scratch().
void forward_with_shared_keys(Context& context, const Plan& plan, Params params, const Outputs& outputs);
void backward_with_shared_keys(Context& context, const Plan& plan, Params params, const OutputGradients& d_out,
                               const InputGradients& d_in);

}  // namespace flashgla::ops::gated_linear_attention::cuda
