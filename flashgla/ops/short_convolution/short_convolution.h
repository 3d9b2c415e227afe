// Causal depthwise convolution over time, width W, then SiLU when asked. As before q, k and v in GLA's optional short
// convolution (flash-linear-attention's ShortConvolution) and in Mamba.
//
//     z[t,d] = bias[d] + sum_{j=0}^{W-1} weight[d,j] x[t-(W-1)+j,d];   y = silu(z) or z
//
// x before a sequence's start is its initial state (zero when absent). Each channel's state is the last W-1 inputs,
// oldest first.
// Shapes: x, y, dy, dx [B,T,D] (any strides, D contiguous); weight, dweight [D,W] contiguous, 2 <= W <= 4; bias, dbias
// [D]; states [N,D,W-1] contiguous, N = B, or the sequences of cu_seqlens (then B = 1).
// dtypes: x, y one of f64, f32, bf16, f16; weight that dtype, f32 or bf16 (f64 with f64), bias weight's; states,
// dweight and dbias f32 (f64 with f64). Throw Error naming the argument.
#pragma once

#include <cstdint>

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"

namespace flashgla::ops::short_convolution {

enum class Activation : std::uint8_t { none, silu };

struct Inputs {
  TensorView x;
  TensorView weight;
  TensorView initial_state;  // absent: zeros
  TensorView cu_seqlens;     // absent, or i32/i64 [N+1]: 0 = c_0 <= c_1 <= ... <= c_N = T (empty sequences allowed)
  TensorView bias{};         // absent: none
};

struct Outputs {
  TensorView y;
  TensorView final_state;  // absent: not wanted
};

struct OutputGradients {
  TensorView dy;
  TensorView d_final_state;  // absent: zero
};

struct InputGradients {
  TensorView dx;               // overwritten
  TensorView dweight;          // accumulated
  TensorView d_initial_state;  // overwritten; absent: not wanted
  TensorView dbias{};          // accumulated; absent without a bias
};

// y must not overlap x.
void forward(Context& context, const Inputs& inputs, const Outputs& outputs, Activation activation);

// dx must not overlap x or dy.
void backward(Context& context, const Inputs& inputs, const OutputGradients& output_gradients,
              const InputGradients& input_gradients, Activation activation);

// One token for each of B sequences: x, y [B,D]; state [B,D,W-1] updated in place. y may be x. bias: absent: none.
void step(Context& context, const TensorView& x, const TensorView& weight, const TensorView& state, const TensorView& y,
          Activation activation, const TensorView& bias = {});

}  // namespace flashgla::ops::short_convolution
