// What makes Hyena's filter of an MLP's values (Poli et al. 2023, "Hyena Hierarchy", section 3.3 and appendix): sines
// of trained frequencies between its layers, and a window that decays with time.
//
//     sine       y[i,d] = sin(frequency[d] x[i,d])
//     window     y[t,d] = x[t,d] (exp(-t/(length - 1) |delta_d|) + shift),
//                |delta_d| from ln(100) / 1.5 to ln(100) / 0.3 in even steps over the channels
//
// Shapes: x, y and gradients [rows,D], last dimension contiguous; frequency and its gradient [D] contiguous. dtypes: x
// and all of its shape f64, f32, bf16 or f16; frequency that dtype, f32 or bf16 (f64 with f64), its gradient f32 (f64
// with f64); a window's y may have another floating dtype. Throw Error naming the argument.
#pragma once

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"

namespace flashgla::ops::hyena_filter {

void sine_forward(Context& context, const TensorView& x, const TensorView& frequency, const TensorView& y);

// dx = dy frequency cos(frequency x), which may be dy; dfrequency += sum over rows of dy x cos(frequency x).
void sine_backward(Context& context, const TensorView& x, const TensorView& frequency, const TensorView& dy,
                   const TensorView& dx, const TensorView& dfrequency);

// y may be x. Its own gradient: dx is the window of dy.
struct Window {
  std::int64_t length = 0;  // of a filter; longer than 1
  double shift = 0.0;
};
void window(Context& context, const TensorView& x, const Window& window, const TensorView& y);

}  // namespace flashgla::ops::hyena_filter
