// The recurrence without gates, on Hopper, which reads q and k from their own rows.
#include "flashgla/ops/gated_linear_attention/cuda/forward/recurrence.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {
template void launch_walk<TensorCore90, true>(cudaStream_t, const Params&, const TwoPasses&, Recurrence, bool);
}  // namespace flashgla::ops::gated_linear_attention::cuda
