// The forget gate's activation. Yang et al. 2024, section 4.4: alpha = sigmoid(x)^(1/tau), tau = 16; here its log.
//
//     g = max(log(sigmoid(x)) / normalizer, clamp_min)       natural log, so g <= 0
//
// Shapes [...,D], equal; any strides, last dimension contiguous. dtypes: x, dx one of f64, f32, bf16, f16; g, dg that
// dtype or f32 (f64 with f64). normalizer > 0. Throw Error naming the argument.
#pragma once

#include <limits>

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"

namespace flashgla::ops::log_sigmoid_gate {

constexpr double kNoClamp = -std::numeric_limits<double>::infinity();

// g may be x.
void forward(Context& context, const TensorView& x, const TensorView& g, double normalizer,
             double clamp_min = kNoClamp);

// dx = dg sigmoid(-x) / normalizer where log(sigmoid(x)) / normalizer >= clamp_min, else 0. Overwritten; dx may be dg.
void backward(Context& context, const TensorView& x, const TensorView& dg, const TensorView& dx, double normalizer,
              double clamp_min = kNoClamp);

}  // namespace flashgla::ops::log_sigmoid_gate
