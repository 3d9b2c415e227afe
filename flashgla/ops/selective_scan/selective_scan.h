// Mamba's recurrence with what stands around it (Gu and Dao 2023, "Mamba", algorithm 2). E channels e, each with K
// states k; B and C are of a token and shared by all channels.
//
//     dt       = ln(1 + exp(raw + dt_bias))                              [E] of a token
//     h_t[e,k] = exp(dt_t[e] A[e,k]) h_(t-1)[e,k] + dt_t[e] B_t[k] x_t[e],     A = -exp(a_log)
//     y_t[e]   = (sum_k C_t[k] h_t[e,k] + skip[e] x_t[e]) silu(z_t[e])
//
// Shapes: x, raw, z, y and their gradients [B,T,E], b, c [B,T,K] (last dimension contiguous, any strides before it);
// dt_bias, skip [E], a_log [E,K] contiguous; states h0, ht [N,E,K] contiguous, N = B, or the sequences of cu_seqlens
// (then B = 1). dtypes: x and all of its shape, b, c: one of f64, f32, bf16, f16; parameters that dtype, f32 or bf16
// (f64 with f64); states and gradients of parameters f32 (f64 with f64). Throw Error naming the argument.
#pragma once

#include <cstddef>
#include <cstdint>

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"

namespace flashgla::ops::selective_scan {

struct Inputs {
  TensorView x, raw, z;
  TensorView b, c;
  TensorView dt_bias, a_log, skip;
  TensorView h0;          // absent: zeros
  TensorView cu_seqlens;  // absent, or i32 [N+1]: 0 = c_0 <= c_1 <= ... <= c_N = T (empty sequences allowed)
};

struct Outputs {
  TensorView y;     // may be absent: only ht and states
  TensorView ht;    // absent: not wanted
  TensorView kept;  // u8 [kept_bytes] of the operator's own for backward; absent: backward computes it again
};

struct InputGradients {
  TensorView dx, draw, dz, db, dc;  // overwritten; the gradient of dt_bias is the sum of draw over the tokens
  TensorView da_log, dskip;         // accumulated
};

// Of `Outputs::kept`.
std::size_t kept_bytes(const Context& context, const Inputs& inputs);

// y must not overlap an input.
void forward(Context& context, const Inputs& inputs, const Outputs& outputs);

// From dy; no gradient flows into h0 or from ht. Gradients of activations must not overlap an input or dy.
void backward(Context& context, const Inputs& inputs, const TensorView& kept, const TensorView& dy,
              const InputGradients& gradients);

// What a step's raw is the product of: raw = ranks weight^T, ranks [N,R] of x's dtype, weight [E,R] contiguous.
struct StepProjection {
  TensorView ranks, weight;
};

// Whether a step of such inputs computes raw itself.
bool step_projects(const Context& context, const Inputs& inputs, const StepProjection& projection);

// One token for each of N sequences: x, raw, z, y [N,E], b, c [N,K]; state [N,E,K] updated in place. y may be x. h0 and
// cu_seqlens are absent, and so is raw with a projection, which only a step that projects takes.
void step(Context& context, const Inputs& inputs, const TensorView& state, const TensorView& y,
          const StepProjection& projection = {});

}  // namespace flashgla::ops::selective_scan
