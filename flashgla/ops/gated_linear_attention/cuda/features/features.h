// Feature maps and the normaliser, as kernels before and after the operator without them (features/README.md).
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/rest_of_call.h"

namespace flashgla::ops::gated_linear_attention::cuda {

// The problem that is left for the other kernels: identity features, no normaliser.
Problem without_features(const Problem& problem);

// Whether the call has a feature map or a normaliser and goes this way: where what is left of it goes by chunks.
bool goes_through_features(const Problem& problem);

// `rest` is called once with what is left of the call, in planning mode too. Workspace from context.scratch().
void forward_through_features(Context& context, const Problem& problem, const Inputs& inputs, const Outputs& outputs,
                              const RestOfForward& rest);
// Reads outputs.o with a normaliser.
void backward_through_features(Context& context, const Problem& problem, const Inputs& inputs, const Outputs& outputs,
                               const OutputGradients& d_out, const InputGradients& d_in, const RestOfBackward& rest);

}  // namespace flashgla::ops::gated_linear_attention::cuda
