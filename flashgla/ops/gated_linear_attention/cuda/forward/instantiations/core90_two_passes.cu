#include "flashgla/ops/gated_linear_attention/cuda/forward/prepare.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/forward/recurrence.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/forward/segments.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {
template void launch_forward_prepare<TensorCore90>(Context&, const Params&, const Prepared&);
template void launch_segments<TensorCore90>(cudaStream_t, const Params&, const Recurrence&, const Segments&);
template void launch_walk<TensorCore90, false>(cudaStream_t, const Params&, const TwoPasses&, Recurrence, bool);
}  // namespace flashgla::ops::gated_linear_attention::cuda
