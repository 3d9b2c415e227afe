// Layer normalisation over the last dimension. Ba, Kiros and Hinton 2016, "Layer Normalization", eq. 3.
//
//     m = mean_d(x_d);   r = 1 / sqrt(mean_d((x_d - m)^2) + epsilon)
//     y_d = (x_d - m) r weight_d + bias_d
//
// Shapes: x, y, dy, dx [...,D] (rows = all dimensions but the last; any strides, last dimension contiguous); weight,
// bias [D]; mean, rstd [rows] contiguous.
// dtypes: activations one of f64, f32, bf16, f16; weight and bias that dtype, f32 or bf16 (f64 with f64); mean, rstd
// and dweight f32 (f64 with f64). Arithmetic in f32 (f64 with f64). Throw Error naming the argument.
#pragma once

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"

namespace flashgla::ops::layer_norm {

struct Inputs {
  TensorView x, weight, bias;
};

struct Outputs {
  TensorView y;           // may be x
  TensorView mean, rstd;  // m and r of each row; absent, both: not wanted (inference)
};

void forward(Context& context, const Inputs& inputs, const Outputs& outputs, double epsilon);

// With u_d = dy_d weight_d and n_d = (x_d - m) r:
//     dx_d = r (u_d - mean_e(u_e) - n_d mean_e(u_e n_e));  dweight_d += sum over rows of dy_d n_d
// dx is overwritten, or added to with accumulate_dx (the residual branch's gradient is already there). dweight is
// accumulated. dx may be dy when not accumulating. The bias's gradient is a sum of dy over rows
// (elementwise::column_sum).
void backward(Context& context, const TensorView& x, const TensorView& weight, const TensorView& mean,
              const TensorView& rstd, const TensorView& dy, const TensorView& dx, bool accumulate_dx,
              const TensorView& dweight);

}  // namespace flashgla::ops::layer_norm
