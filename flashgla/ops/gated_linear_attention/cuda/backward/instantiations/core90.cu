#include "flashgla/ops/gated_linear_attention/cuda/backward/kernels.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {
template void launch_state<TensorCore90, false, 1>(const Params&, const BackwardWorkspace&, const StatePass&,
                                                   cudaStream_t);
template void launch_state<TensorCore90, false, 2>(const Params&, const BackwardWorkspace&, const StatePass&,
                                                   cudaStream_t);
template void launch_state<TensorCore90, true, 1>(const Params&, const BackwardWorkspace&, const StatePass&,
                                                  cudaStream_t);
template void launch_state<TensorCore90, true, 2>(const Params&, const BackwardWorkspace&, const StatePass&,
                                                  cudaStream_t);
template void launch_dv<TensorCore90, 1>(const Params&, const BackwardWorkspace&, const Gradients&, cudaStream_t);
template void launch_dv<TensorCore90, 2>(const Params&, const BackwardWorkspace&, const Gradients&, cudaStream_t);
}  // namespace flashgla::ops::gated_linear_attention::cuda
