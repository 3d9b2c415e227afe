#include "flashgla/ops/gated_linear_attention/cuda/value_gates/launch.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {
template void forward_with_value_gates<TensorCore80>(Context&, const Plan&, const Params&);
template void backward_with_value_gates<TensorCore80>(Context&, const Plan&, const Params&, const OutputGradients&,
                                                      const InputGradients&);
}  // namespace flashgla::ops::gated_linear_attention::cuda
