// Launchers of this folder's kernels: bf16, keys and values of 64 or of 128 channels, on Hopper.
#pragma once

#include "flashgla/ops/softmax_attention/implementations.h"

namespace flashgla::ops::softmax_attention::cuda::hopper {

void forward(Context& context, const Inputs& inputs, const Outputs& outputs, const Options& options);
void backward(Context& context, const Inputs& inputs, const Outputs& outputs, const TensorView& d_o,
              const InputGradients& gradients, const Options& options);

}  // namespace flashgla::ops::softmax_attention::cuda::hopper
