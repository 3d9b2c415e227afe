#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles/kernels.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {
template struct SplitLaunch<SplitKernel<FLASHGLA_TENSOR_CORE, __half, 2>>;
}  // namespace flashgla::ops::gated_linear_attention::cuda
