// Feature maps and the normaliser, as kernels before and after the operator without them (features/README.md).
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/cuda.h"

namespace flashgla::ops::gated_linear_attention::cuda {

// Around calls whose plan has features: `rest` is called once with what is left of the call, without_features(problem)
// (plan.h), in planning mode too. Workspace from context.scratch().
void forward_through_features(Context& context, const Problem& problem, const Inputs& inputs, const Outputs& outputs,
                              const RestOfCall& rest);
// Reads outputs.o with a normaliser.
void backward_through_features(Context& context, const Problem& problem, const Inputs& inputs, const Outputs& outputs,
                               const OutputGradients& d_out, const InputGradients& d_in, const RestOfCall& rest);

}  // namespace flashgla::ops::gated_linear_attention::cuda
