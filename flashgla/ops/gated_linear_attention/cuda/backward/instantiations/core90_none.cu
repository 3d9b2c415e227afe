#include "flashgla/ops/gated_linear_attention/cuda/backward/kernels.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {
template struct BackwardLaunch<TensorCore90, GateTile::none>;
}  // namespace flashgla::ops::gated_linear_attention::cuda
