// Rows of a table by token, and the sum of gradients by token.
//
//     y[r,:] = table[tokens[r],:]          dtable[tokens[r],:] += dy[r,:]
//
// Shapes: tokens [...] i32, contiguous; table [V,D]; y, dy [...,D] with as many rows as tokens (any strides, last
// dimension contiguous); dtable [V,D] f32 (f64 with f64).
// dtypes: y and dy f64, f32, bf16 or f16; the table y's dtype, or bf16 beside f32 y. Throw Error naming the argument.
//
// A token outside [0, V): on the CPU an Error that names it with its position. On CUDA, where the host does not wait,
// its row of y is NaN, its row of dy goes nowhere, and bad_token, where it is given, says so: i32 [1], which becomes
// the smallest of position + 1 and what it holds, 0 standing for none yet.
#pragma once

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"

namespace flashgla::ops::embedding {

void forward(Context& context, const TensorView& tokens, const TensorView& table, const TensorView& y,
             const TensorView& bad_token = {});

// Accumulates. Rows of one token are added in an order that the tokens alone decide: the same bits for any number of
// threads, and from run to run. CUDA takes a workspace.
void backward(Context& context, const TensorView& tokens, const TensorView& dy, const TensorView& dtable,
              const TensorView& bad_token = {});

}  // namespace flashgla::ops::embedding
