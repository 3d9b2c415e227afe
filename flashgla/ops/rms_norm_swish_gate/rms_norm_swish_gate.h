// RMSNorm of each head's output, times the swish of an output gate.
// Yang et al. 2024, section 4.4: Swish(x W_r) * LayerNorm(o_t), with RMSNorm as in flash-linear-attention.
//
//     r = 1 / sqrt(mean_d(x_d^2) + epsilon)
//     y_d = x_d r weight_d gate_d sigmoid(gate_d)           (weight 1 when absent)
//
// Shapes: x, gate, y, dy, dx, dgate [...,D] ([rows,D] or [B,T,H,D]; rows = all dimensions but the last; any strides,
// last dimension contiguous); weight [D]; rstd [rows] contiguous, rows in row-major order of the leading dimensions.
// dtypes: activations one of f64, f32, bf16, f16; weight that dtype, f32 or bf16 (f64 with f64); rstd and dweight f32
// (f64 with f64). Arithmetic in f32 (f64 with f64). Throw Error naming the argument.
#pragma once

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"

namespace flashgla::ops::rms_norm_swish_gate {

// rstd absent: not wanted (inference). y may be x or gate.
void forward(Context& context, const TensorView& x, const TensorView& gate, const TensorView& weight,
             const TensorView& y, const TensorView& rstd, double epsilon);

// dx and dgate are overwritten (dx may be dy, dgate may be gate); dweight is accumulated; absent: not computed.
void backward(Context& context, const TensorView& x, const TensorView& gate, const TensorView& weight,
              const TensorView& rstd, const TensorView& dy, const TensorView& dx, const TensorView& dgate,
              const TensorView& dweight);

}  // namespace flashgla::ops::rms_norm_swish_gate
