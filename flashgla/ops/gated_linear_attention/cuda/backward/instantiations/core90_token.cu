#include "flashgla/ops/gated_linear_attention/cuda/backward/constant_gate.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/backward/kernels.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {
template void launch_dq_dk_dg<TensorCore90, GateTile::token>(const Params&, const BackwardWorkspace&, const Gradients&,
                                                             int, cudaStream_t);
template void launch_constant_gate_pairs<TensorCore90>(const Params&, const BackwardWorkspace&, const Strided&,
                                                       cudaStream_t);
}  // namespace flashgla::ops::gated_linear_attention::cuda
