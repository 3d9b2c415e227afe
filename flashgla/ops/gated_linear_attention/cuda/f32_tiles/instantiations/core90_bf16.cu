#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles/kernels.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {
using Kernel = SplitKernel<TensorCore90, __nv_bfloat16, 2>;
template void launch_split_prepare<Kernel>(const Params&, const SplitImages&, cudaStream_t);
template void launch_split_states<Kernel, false>(const Params&, const SplitPass&, cudaStream_t);
template void launch_split_outputs<Kernel, false>(const Params&, const SplitOutputs&, cudaStream_t);
}  // namespace flashgla::ops::gated_linear_attention::cuda
