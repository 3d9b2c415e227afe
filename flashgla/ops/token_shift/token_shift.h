// RWKV's token shift ("time mix"): each token mixed with the one before it, in M proportions at once (Peng et al. 2023,
// "RWKV", section 3.1.1).
//
//     y[m,t,d] = mu[m,d] x[t,d] + (1 - mu[m,d]) x[t-1,d]
//
// x before a sequence's start is its initial state (zero when absent); the state is the last x.
// Shapes: x, dx [B,T,D], y, dy [M,B,T,D] (last dimension contiguous, any strides before it); mu, dmu [M,D] contiguous,
// M 1 to 3; states [N,D] contiguous, N = B, or the sequences of cu_seqlens (then B = 1). dtypes: x, y one of f64, f32,
// bf16, f16; mu that dtype, f32 or bf16 (f64 with f64); states and dmu f32 (f64 with f64). Throw Error naming the
// argument.
#pragma once

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"

namespace flashgla::ops::token_shift {

constexpr std::int64_t kMostMixes = 3;

struct Inputs {
  TensorView x;
  TensorView mu;
  TensorView initial_state;  // absent: zeros
  TensorView cu_seqlens;     // absent, or i32 [N+1]: 0 = c_0 <= c_1 <= ... <= c_N = T (empty sequences allowed)
};

struct Outputs {
  TensorView y;
  TensorView final_state;  // absent: not wanted; of an empty sequence its initial one
};

struct InputGradients {
  TensorView dx;   // overwritten
  TensorView dmu;  // accumulated
};

// y must not overlap x.
void forward(Context& context, const Inputs& inputs, const Outputs& outputs);

// No gradient flows into the initial or from the final state. dx must not overlap x or dy.
void backward(Context& context, const Inputs& inputs, const TensorView& dy, const InputGradients& gradients);

// One token for each of N sequences: x [N,D], y [M,N,D]; state [N,D] becomes x.
void step(Context& context, const TensorView& x, const TensorView& mu, const TensorView& state, const TensorView& y);

}  // namespace flashgla::ops::token_shift
