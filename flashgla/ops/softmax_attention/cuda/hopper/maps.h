// Tensors as TMA takes them: tensor maps, made on the host for each call.
#pragma once

#include <cuda.h>

#include "flashgla/base/tensor.h"

namespace flashgla::ops::softmax_attention::cuda::hopper {

// Of [batch, token, head, channel] in bf16, rows at multiples of 16 bytes: boxes of 64 channels of so many tokens of a
// head, in the 128-byte swizzle; zeros beyond the tensor. Absent: none. Throws Error where the driver refuses it.
CUtensorMap map_of(const TensorView& tensor, int tokens);

}  // namespace flashgla::ops::softmax_attention::cuda::hopper
