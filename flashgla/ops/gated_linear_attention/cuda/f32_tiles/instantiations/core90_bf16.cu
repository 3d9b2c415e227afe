#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles/kernels.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {
template struct SplitLaunch<SplitKernel<TensorCore90, __nv_bfloat16, 1>>;
}  // namespace flashgla::ops::gated_linear_attention::cuda
