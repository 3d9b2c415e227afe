// State space behind its convolution, in one pass each way (convolved.cu). False: not such a call, and nothing was
// done.
#pragma once

#include "flashgla/ops/state_space/implementations.h"

namespace flashgla::ops::state_space::cuda {

bool convolved_forward(Context& context, const Convolution& convolution, const Inputs& in, const Outputs& out,
                       const TensorView& final_state);
bool convolved_backward(Context& context, const Convolution& convolution, const Inputs& in, const TensorView& skip,
                        const OutputGradients& from, const InputGradients& to, const TensorView& dweight);

}  // namespace flashgla::ops::state_space::cuda
