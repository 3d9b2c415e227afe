#include "flashgla/ops/gated_linear_attention/cuda/backward/kernels.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {
template struct BackwardLaunch<FLASHGLA_TENSOR_CORE, GatesAs::bf16>;
}  // namespace flashgla::ops::gated_linear_attention::cuda
