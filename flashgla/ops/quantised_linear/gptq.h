// GPTQ (Frantar et al. 2022): each column of a matrix is rounded in turn, and the columns that are still to come make
// up for its error on the inputs that a calibration has seen.
#pragma once

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"

namespace flashgla::ops::quantised_linear {

// values f32 [N,K]; products f32 [K,K]: mean x^T x of the matrix' inputs; packed: the matrix with scales that stay as
// they are, and codes that are chosen anew. Columns of the largest inputs come first; 1% of the mean square is added to
// every input's.
void compensate(Context& context, const TensorView& values, const TensorView& products, const TensorView& packed);

}  // namespace flashgla::ops::quantised_linear
