#include "flashgla/ops/gated_linear_attention/cuda/backward/kernels.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {
template void launch_state<TensorCore80, false, 1>(const Params&, const BackwardWorkspace&, const StatePass&,
                                                   cudaStream_t);
template void launch_state<TensorCore80, false, 2>(const Params&, const BackwardWorkspace&, const StatePass&,
                                                   cudaStream_t);
template void launch_state<TensorCore80, true, 1>(const Params&, const BackwardWorkspace&, const StatePass&,
                                                  cudaStream_t);
template void launch_state<TensorCore80, true, 2>(const Params&, const BackwardWorkspace&, const StatePass&,
                                                  cudaStream_t);
template void launch_dv<TensorCore80, 1>(const Params&, const BackwardWorkspace&, const Gradients&, cudaStream_t);
template void launch_dv<TensorCore80, 2>(const Params&, const BackwardWorkspace&, const Gradients&, cudaStream_t);
}  // namespace flashgla::ops::gated_linear_attention::cuda
