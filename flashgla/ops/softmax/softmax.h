// Softmax over the last dimension.
//
//     y_d = e^{x_d - max x} / sum_e e^{x_e - max x}
//
// Shapes: x, y, dy, dx of one shape [...,D], D >= 1 (any strides, last dimension contiguous). dtypes: one of f64, f32,
// bf16, f16; arithmetic in f32 (f64 with f64). Throw Error naming the argument.
#pragma once

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"

namespace flashgla::ops::softmax {

void forward(Context& context, const TensorView& x, const TensorView& y);  // y may be x

// From forward's y: dx_d = y_d (dy_d - sum_e dy_e y_e). dx may be dy.
void backward(Context& context, const TensorView& y, const TensorView& dy, const TensorView& dx);

}  // namespace flashgla::ops::softmax
