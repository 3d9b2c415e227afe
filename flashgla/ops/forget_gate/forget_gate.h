// A log gate and the key that goes with it, 1 less the gate: what is forgotten makes room for what comes. HGRN2 (Qin et
// al. 2024, eq. 6: with a lower bound) and GSA (Zhang et al. 2024, eq. 7: with a normalizer).
//
//     g = ln(b + (1 - b) sigmoid(x)) / normalizer          b: bound, 0 where absent; natural log
//     k = 1 - e^g
//
// Shapes: all tensors of one shape, any strides (a bound of channels is a view of stride 0 over tokens), last dimension
// contiguous. dtypes: x, g, k one of f64, f32, bf16, f16; bound and dbound f32 (f64 with f64). Arithmetic in f32 (f64
// with f64). Throw Error naming the argument.
#pragma once

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"

namespace flashgla::ops::forget_gate {

// Each bound in (0, 1).
void forward(Context& context, const TensorView& x, const TensorView& bound, const TensorView& g, const TensorView& k,
             double normalizer);

// dx is overwritten, may be dg or dk; dbound, of each element, is overwritten, and present exactly when bound is.
void backward(Context& context, const TensorView& x, const TensorView& bound, const TensorView& dg,
              const TensorView& dk, const TensorView& dx, const TensorView& dbound, double normalizer);

}  // namespace flashgla::ops::forget_gate
