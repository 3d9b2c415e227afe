// The CUDA row's gate and norm, which lie in a source of their own.
#pragma once

#include "flashgla/ops/state_space/state_space.h"

namespace flashgla::ops::state_space::cuda {

void gate_norm(Context& context, const Gate& in, const TensorView& weight, double epsilon, const TensorView& y,
               const TensorView& rstd);
void gate_norm_backward(Context& context, const Gate& in, const TensorView& weight, const TensorView& rstd,
                        const TensorView& dy, const TensorView& ds, const TensorView& dz, const TensorView& dweight);

}  // namespace flashgla::ops::state_space::cuda
