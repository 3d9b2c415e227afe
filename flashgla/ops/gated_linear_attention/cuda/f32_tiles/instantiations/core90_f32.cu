#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles/value_kernels.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {
using Kernel = SplitKernel<TensorCore90, float, 3>;
template void launch_split_prepare<Kernel>(const Params&, const SplitImages&, cudaStream_t);
template void launch_split_states<Kernel, false>(const Params&, const SplitPass&, cudaStream_t);
template void launch_split_states<Kernel, true>(const Params&, const SplitPass&, cudaStream_t);
template void launch_split_outputs<Kernel, false>(const Params&, const SplitOutputs&, cudaStream_t);
template void launch_split_outputs<Kernel, true>(const Params&, const SplitOutputs&, cudaStream_t);
template void launch_split_gradients<Kernel>(const Params&, const SplitGradients&, cudaStream_t);
template void launch_split_later<Kernel>(const Params&, const SplitImages&, cudaStream_t);
template void launch_gated_states<Kernel, false>(const Params&, const SplitPass&, cudaStream_t);
template void launch_gated_states<Kernel, true>(const Params&, const SplitPass&, cudaStream_t);
template void launch_gated_outputs<Kernel>(const Params&, const SplitOutputs&, cudaStream_t);
template void launch_gated_gradients<Kernel, false>(const Params&, const SplitGradients&, cudaStream_t);
template void launch_gated_gradients<Kernel, true>(const Params&, const SplitGradients&, cudaStream_t);
}  // namespace flashgla::ops::gated_linear_attention::cuda
