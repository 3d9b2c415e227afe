// The gated unit of the MLP. Shazeer 2020, "GLU Variants Improve Transformer", eq. 6 (without the projections).
//
//     y = gate sigmoid(gate) up
//
// Shapes [...,D], all equal; any strides, last dimension contiguous, so gate and up may be halves of one tensor.
// dtypes: all one of f64, f32, bf16, f16, but y of forward may be bf16 or f16 beside f32; arithmetic in f32 (f64 with
// f64). Throw Error naming the argument.
#pragma once

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"

namespace flashgla::ops::swiglu {

// y may be gate or up.
void forward(Context& context, const TensorView& gate, const TensorView& up, const TensorView& y);

// dgate = dy up (s + gate s (1 - s)), dup = dy gate s, with s = sigmoid(gate). Overwritten; dgate may be gate or dy,
// dup may be up or dy (not both dy). y: forward's result again, so that nobody need keep it; absent: not wanted; it may
// be dy where dgate and dup are not.
void backward(Context& context, const TensorView& gate, const TensorView& up, const TensorView& dy,
              const TensorView& dgate, const TensorView& dup, const TensorView& y = {});

}  // namespace flashgla::ops::swiglu
