// RWKV-4's weighted sum over the past with its receptance (Peng et al. 2023, "RWKV: Reinventing RNNs for the
// Transformer Era", section 3; BlinkDL/RWKV-LM's wkv). Of each channel apart:
//
//     w      = -exp(time_decay) < 0,  u = time_first
//     A_t    = e^w A_(t-1) + e^(k_t) v_t,   B_t = e^w B_(t-1) + e^(k_t)
//     y_t    = sigmoid(r_t) (A_(t-1) + e^(u + k_t) v_t) / (B_(t-1) + e^(u + k_t))
//
// The state holds (a, b, p) with A = a e^p, B = b e^p and p the running maximum of the exponents, so that nothing
// overflows whatever k is. b is at least 1 after the first token; b <= 0 (zeros, say) means that there was none.
// Shapes: k, v, r, y and their gradients [B,T,E] (last dimension contiguous, any strides before it); time_decay,
// time_first [E] contiguous; states h0, ht [N,3,E] contiguous: a, b and p, N = B, or the sequences of cu_seqlens (then
// B = 1). dtypes: k and all of its shape: one of f64, f32, bf16, f16; parameters that dtype, f32 or bf16 (f64 with
// f64); states and gradients of parameters f32 (f64 with f64). Throw Error naming the argument.
#pragma once

#include <cstddef>
#include <cstdint>

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"

namespace flashgla::ops::wkv {

struct Inputs {
  TensorView k, v, r;
  TensorView time_decay, time_first;
  TensorView h0;          // absent: no token before
  TensorView cu_seqlens;  // absent, or i32 [N+1]: 0 = c_0 <= c_1 <= ... <= c_N = T (empty sequences allowed)
};

struct Outputs {
  TensorView y;     // may be absent: only ht and states
  TensorView ht;    // absent: not wanted; of an empty sequence what h0 is
  TensorView kept;  // u8 [kept_bytes] of the operator's own for backward; absent: backward computes it again
};

struct InputGradients {
  TensorView dk, dv, dr;                // overwritten
  TensorView dtime_decay, dtime_first;  // accumulated
};

// Of `Outputs::kept`.
std::size_t kept_bytes(const Context& context, const Inputs& inputs);

// y must not overlap an input.
void forward(Context& context, const Inputs& inputs, const Outputs& outputs);

// From dy; no gradient flows into h0 or from ht. Gradients of activations must not overlap an input or dy.
void backward(Context& context, const Inputs& inputs, const TensorView& kept, const TensorView& dy,
              const InputGradients& gradients);

// One token for each of N sequences: k, v, r, y [N,E]; state [N,3,E] updated in place. y may be an input. h0 and
// cu_seqlens are absent.
void step(Context& context, const Inputs& inputs, const TensorView& state, const TensorView& y);

}  // namespace flashgla::ops::wkv
