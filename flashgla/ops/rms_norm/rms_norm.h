// Root-mean-square normalisation over the last dimension.
// Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4.
//
//     r = 1 / sqrt(mean_d(x_d^2) + epsilon)
//     y_d = x_d r weight_d                 (weight 1 when absent)
//
// Shapes: x, y, dy, dx [...,D] (rows = all dimensions but the last; any strides, last dimension
// contiguous); weight [D]; rstd [rows] contiguous.
// dtypes: activations one of f64, f32, bf16, f16; weight that dtype, f32 or bf16 (f64 with f64); rstd and dweight f32
// (f64 with f64). Arithmetic in f32 (f64 with f64). Throw Error naming the argument.
#pragma once

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"

namespace flashgla::ops::rms_norm {

struct Inputs {
  TensorView x;
  TensorView weight;  // absent: ones
};

struct Outputs {
  TensorView y;     // may be x
  TensorView rstd;  // r for each row; absent: not wanted (inference)
};

void forward(Context& context, const Inputs& inputs, const Outputs& outputs, double epsilon);

// With u_d = dy_d weight_d:
//     dx_d = r (u_d - x_d r^2 mean_e(u_e x_e));  dweight_d += sum over rows of dy_d x_d r
// dx is overwritten, or added to with accumulate_dx (the residual branch's gradient is already there). dweight is
// accumulated; absent: not computed. dx may be dy when not accumulating.
void backward(Context& context, const TensorView& x, const TensorView& weight, const TensorView& rstd,
              const TensorView& dy, const TensorView& dx, bool accumulate_dx, const TensorView& dweight);

}  // namespace flashgla::ops::rms_norm
