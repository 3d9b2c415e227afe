// What gradient clipping and the check for NaN need of one tensor. Contiguous, f64, f32, bf16 or f16.
#pragma once

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"

namespace flashgla::ops::global_norm {

// Sum of x^2 in f64 over a fixed partition: the same bits for any number of threads. 0 when planning.
double sum_of_squares(Context& context, const TensorView& x);

// Whether any element is NaN or infinite. false when planning.
bool find_non_finite(Context& context, const TensorView& x);

}  // namespace flashgla::ops::global_norm
