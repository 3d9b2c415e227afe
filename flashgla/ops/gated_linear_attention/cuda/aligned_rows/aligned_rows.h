// Copies of tensors whose rows the kernels by chunks cannot move, before and after those (aligned_rows/README.md).
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/rest_of_call.h"

namespace flashgla::ops::gated_linear_attention::cuda {

// Whether the problem's kernels move rows in pieces of 16 bytes: all but those that go token by token.
bool moves_pieces(const Problem& problem);

// Whether the rows of the call, where its kernels move pieces of them, can be moved as they are: widths, strides and
// addresses are multiples of 16 bytes, tokens apart from each other, and 64 of them less than 2^31 bytes.
bool has_aligned_rows(const Problem& problem, const Inputs& inputs, const Outputs& outputs);
// The same of the backward, which does not read outputs.o then.
bool has_aligned_rows(const Problem& problem, const Inputs& inputs, const OutputGradients& d_out,
                      const InputGradients& d_in);

// The problem that is left once rows are aligned: widths rounded up. States are kept for it.
Problem with_aligned_rows(const Problem& problem);

// `rest` is called once with what is left of the call, in planning mode too. Workspace from context.scratch().
void forward_with_aligned_rows(Context& context, const Problem& problem, const Inputs& inputs, const Outputs& outputs,
                               const RestOfForward& rest);
void backward_with_aligned_rows(Context& context, const Problem& problem, const Inputs& inputs, const Outputs& outputs,
                                const OutputGradients& d_out, const InputGradients& d_in, const RestOfBackward& rest);

}  // namespace flashgla::ops::gated_linear_attention::cuda
