// Launches of the operator's kernels. `bad`: null, or where the first bad token's position + 1 is noted.
#pragma once

#include "flashgla/ops/embedding/embedding.h"

namespace flashgla::ops::embedding::cuda {

void forward(Context& context, const TensorView& tokens, const TensorView& table, const TensorView& y,
             const TensorView& bad);
void backward(Context& context, const TensorView& tokens, const TensorView& dy, const TensorView& dtable,
              const TensorView& bad);

}  // namespace flashgla::ops::embedding::cuda
