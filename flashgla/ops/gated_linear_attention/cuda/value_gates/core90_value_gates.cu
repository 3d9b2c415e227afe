#include "flashgla/ops/gated_linear_attention/cuda/value_gates/launch.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {
template struct ValueGates<TensorCore90>;
}  // namespace flashgla::ops::gated_linear_attention::cuda
