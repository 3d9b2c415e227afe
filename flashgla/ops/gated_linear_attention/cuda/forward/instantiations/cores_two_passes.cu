#include "flashgla/ops/gated_linear_attention/cuda/forward/prepare.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/forward/recurrence.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/forward/segments.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {
template void launch_forward_prepare<FLASHGLA_TENSOR_CORE>(Context&, const Params&, const Prepared&);
template void launch_segments<FLASHGLA_TENSOR_CORE>(cudaStream_t, const Params&, const Recurrence&, const Segments&);
template void launch_walk<FLASHGLA_TENSOR_CORE, false>(cudaStream_t, const Params&, const TwoPasses&, Recurrence, bool);
}  // namespace flashgla::ops::gated_linear_attention::cuda
