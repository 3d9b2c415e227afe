// What gradient clipping and the check for NaN need of one tensor. Contiguous, f64, f32, bf16 or f16.
#pragma once

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"

namespace flashgla::ops::global_norm {

// sum = sum of x^2, f64 [1] in the device's memory, in f64 over a fixed partition: the same bits for any number of
// threads. Not finite exactly when an element of x is not (squares of f32 do not overflow f64).
void sum_of_squares(Context& context, const TensorView& x, const TensorView& sum);

// Whether any element is NaN or infinite: for error reports, because the host waits for the answer. false when
// planning.
bool find_non_finite(Context& context, const TensorView& x);

}  // namespace flashgla::ops::global_norm
