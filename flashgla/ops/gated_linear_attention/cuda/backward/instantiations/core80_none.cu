#include "flashgla/ops/gated_linear_attention/cuda/backward/kernels.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {
template void launch_dq_dk_dg<TensorCore80, GateTile::none>(const Params&, const BackwardWorkspace&, const Gradients&,
                                                            int, cudaStream_t);
}  // namespace flashgla::ops::gated_linear_attention::cuda
