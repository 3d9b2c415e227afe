// Rows of a table by token, and the sum of gradients by token.
//
//     y[r,:] = table[tokens[r],:]          dtable[tokens[r],:] += dy[r,:]
//
// Shapes: tokens [...] i32, contiguous; table [V,D]; y, dy [...,D] with as many rows as tokens (any strides, last
// dimension contiguous); dtable [V,D] f32 (f64 with f64).
// dtypes: y and dy f64, f32, bf16 or f16; the table y's dtype, or bf16 beside f32 y. Throw Error naming the argument;
// a token outside [0, V) is named with its position.
#pragma once

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"

namespace flashgla::ops::embedding {

void forward(Context& context, const TensorView& tokens, const TensorView& table, const TensorView& y);

// Accumulates. Rows of one token are added in their order: the same bits for any number of threads.
void backward(Context& context, const TensorView& tokens, const TensorView& dy, const TensorView& dtable);

}  // namespace flashgla::ops::embedding
