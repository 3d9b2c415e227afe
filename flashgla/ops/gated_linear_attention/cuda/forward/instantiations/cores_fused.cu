#include "flashgla/ops/gated_linear_attention/cuda/forward/fused.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {
template void launch_fused<FLASHGLA_TENSOR_CORE>(Context&, const Params&, const OnePass&);
}  // namespace flashgla::ops::gated_linear_attention::cuda
