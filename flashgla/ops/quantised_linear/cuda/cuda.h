// What the operator has on a GPU beside decoding steps, whose kernel is linear_step's.
#pragma once

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"

namespace flashgla::ops::quantised_linear::cuda {

// quantised_linear.h's functions of the same names; arguments are validated, but for the tokens' range: a row of a
// token that is none becomes NaN.
void look_up(Context& context, const TensorView& tokens, const TensorView& weight, std::int64_t rows,
             const TensorView& y);
void decode(Context& context, const TensorView& weight, std::int64_t first, const TensorView& values);

}  // namespace flashgla::ops::quantised_linear::cuda
