// lower_bounds.h on CUDA: w f32 or bf16. Arguments are validated already.
#pragma once

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"

namespace flashgla::ops::lower_bounds::cuda {

void forward(Context& context, const TensorView& w, std::int64_t layer, const TensorView& bound);
void backward(Context& context, const TensorView& w, std::int64_t layer, const TensorView& dbound,
              const TensorView& dw);

}  // namespace flashgla::ops::lower_bounds::cuda
