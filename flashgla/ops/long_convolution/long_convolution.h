// Causal convolution of each channel with a filter as long as the sequence, and a skip (Poli et al. 2023, "Hyena
// Hierarchy", section 3; the FFT convolution of its authors' code).
//
//     y[t,d] = sum_{j=0}^{p+t} filter[j,d] x[t-j,d] + skip[d] x[t,d]
//
// p is how many tokens a sequence has had before, which lie in `past`; x of negative index are those.
// Shapes: x, y, dy, dx [B,T,D] (last dimension contiguous, any strides before it); filter, dfilter [L,D] contiguous, of
// which a sequence uses p + T rows; skip [D]; past [N,C,D] contiguous, positions i32 [N], N = B, or the sequences of
// cu_seqlens (then B = 1). dtypes: x and all of its shape one of f64, f32, bf16, f16; filter, dfilter, dskip f32 (f64
// with f64); skip and past x's, f32 or bf16 (f64 with f64). Throw Error naming the argument.
#pragma once

#include <cstddef>

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"

namespace flashgla::ops::long_convolution {

struct Inputs {
  TensorView x;
  TensorView filter;
  TensorView skip;
  TensorView past, positions;  // absent, both: no token before
  TensorView cu_seqlens;       // absent, or i32 [N+1]: 0 = c_0 <= c_1 <= ... <= c_N = T (empty sequences allowed)
};

struct Outputs {
  TensorView y;
  TensorView kept;  // u8 [kept_bytes] of the operator's own for backward; absent: backward computes it again
};

struct InputGradients {
  TensorView dx;       // overwritten
  TensorView dfilter;  // overwritten; of bf16 x with bf16's error where f16 transforms make it (README.md), else f32's
  TensorView dskip;    // accumulated
};

// Of `Outputs::kept`; 0 where there is nothing to keep.
std::size_t kept_bytes(const Context& context, const Inputs& inputs);

// y must not overlap an input.
void forward(Context& context, const Inputs& inputs, const Outputs& outputs);

// kept: of forward of the same inputs, which it leaves as it is, or absent; of x and filter it reads no values then. No
// gradient flows into the past. dx must not overlap an input or dy.
void backward(Context& context, const Inputs& inputs, const TensorView& kept, const TensorView& dy,
              const InputGradients& gradients);

// One token for each of N sequences: x, y [N,D]; `past` holds it already, at row positions[n] behind the tokens before.
void step(Context& context, const Inputs& inputs, const TensorView& y);

}  // namespace flashgla::ops::long_convolution
