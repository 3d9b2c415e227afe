// Copies of tensors whose rows the kernels by chunks cannot move, before and after those (aligned_rows/README.md).
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/rest_of_call.h"

namespace flashgla::ops::gated_linear_attention::cuda {

// Around calls whose plan moves pieces. Tensors that can be moved as they are stay: widths, strides and addresses are
// multiples of 16 bytes, tokens apart from each other, and 64 of them less than 2^31 bytes. `rest` is called once with
// tensors as wide as with_aligned_rows(problem) has them (plan.h), in planning mode too; the backward's has no o.
// Workspace from context.scratch().
void forward_with_aligned_rows(Context& context, const Problem& problem, const Inputs& inputs, const Outputs& outputs,
                               const RestOfForward& rest);
void backward_with_aligned_rows(Context& context, const Problem& problem, const Inputs& inputs, const Outputs& outputs,
                                const OutputGradients& d_out, const InputGradients& d_in, const RestOfBackward& rest);

// Whether a tensor [B,T,heads,channels] can be moved as it is.
bool is_aligned(const TensorView& view);

}  // namespace flashgla::ops::gated_linear_attention::cuda
