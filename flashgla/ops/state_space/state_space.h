// What Mamba-2 computes around its recurrence, which is gated_linear_attention's with a scalar gate. Dao and Gu 2024,
// "Transformers are SSMs", section 7 and listing 1.
//
// For each token, H heads of V channels (E = H V), G groups of K state channels (S = G K; H % G == 0):
//
//     x, B, C = silu(c + bias)           of E, S and S channels
//     dt      = ln(1 + exp(raw + dt_bias)),   g = -exp(a_log) dt            for each head
//     v       = dt x                      the recurrence's values, beside keys B, queries C and gates g
//     s       = (o + skip x) silu(z)      o the recurrence's outputs; skip for each head
//     y       = s r weight,   r = 1 / sqrt(mean over the channels(s^2) + epsilon)
//
// Any leading dimensions; last dimensions contiguous and any strides before them, but for dq and dk, which are wholly
// contiguous. c, raw, o, z and what they become: one of f64, f32, bf16, f16; parameters (bias, dt_bias, a_log, skip)
// that dtype, f32 or bf16 (f64 with f64) and contiguous; g, dg and sums f32 (f64 with f64). Throw Error naming the
// argument.
#pragma once

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"

namespace flashgla::ops::state_space {

struct Inputs {
  TensorView c;        // [...,E+2S]
  TensorView bias;     // [E+2S]; absent: zeros
  TensorView raw;      // [...,H]
  TensorView dt_bias;  // [H]
  TensorView a_log;    // [H]
};

struct Outputs {
  TensorView u;  // [...,E+2S]: x, B, C
  TensorView v;  // [...,E]
  TensorView g;  // [...,H]
};

struct OutputGradients {
  TensorView dv;  // [...,E]
  TensorView ds;  // [...,E]: of s = o + skip x
  TensorView dk;  // [...,H,K]: of B, as each head used it, or [...,G,K]: the sums over a group's heads
  TensorView dq;  // likewise of C
  TensorView dg;  // [...,H]
};

struct InputGradients {
  TensorView dc;    // [...,E+2S], overwritten
  TensorView draw;  // [...,H], overwritten
  // Sums over the tokens, added to; f32 and contiguous.
  TensorView dbias;     // [E+2S]; absent: not wanted
  TensorView ddt_bias;  // [H]
  TensorView da_log;    // [H]
  TensorView dskip;     // [H]
};

void forward(Context& context, const Inputs& inputs, const Outputs& outputs);
void backward(Context& context, const Inputs& inputs, const TensorView& skip, const OutputGradients& output_gradients,
              const InputGradients& input_gradients);

// The same where c is a convolution (short_convolution.h, without activation), which is kept nowhere: `inputs` has no c
// then, and dc of `input_gradients` is x's gradient. x [B,T,E+2S], and so are u and dc.
struct Convolution {
  TensorView x;
  TensorView weight;         // [E+2S,W]
  TensorView initial_state;  // [N,E+2S,W-1]; absent: zeros
  TensorView cu_seqlens;     // absent, or i32/i64 [N+1]
};
// final_state absent: not wanted.
void forward(Context& context, const Convolution& convolution, const Inputs& inputs, const Outputs& outputs,
             const TensorView& final_state);
// dweight is added to.
void backward(Context& context, const Convolution& convolution, const Inputs& inputs, const TensorView& skip,
              const OutputGradients& output_gradients, const InputGradients& input_gradients,
              const TensorView& dweight);

// What is normalised together: all E channels, or those of some heads as slices.
struct Gate {
  TensorView o, x;  // [...,E]
  TensorView skip;  // [H]
  TensorView z;     // [...,E]
};

// The gate and the norm behind it: y [...,E], which may be o; rstd r for each row, absent: not wanted.
void gate_norm(Context& context, const Gate& inputs, const TensorView& weight, double epsilon, const TensorView& y,
               const TensorView& rstd);
// ds, the gradient of o + skip x, and dz from dy; ds may be dy. dweight is added to; absent: not wanted.
void gate_norm_backward(Context& context, const Gate& inputs, const TensorView& weight, const TensorView& rstd,
                        const TensorView& dy, const TensorView& ds, const TensorView& dz, const TensorView& dweight);

}  // namespace flashgla::ops::state_space
