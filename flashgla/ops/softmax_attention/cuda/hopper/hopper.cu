// The row of the operator's table.
#include "flashgla/ops/softmax_attention/cuda/call.cuh"
#include "flashgla/ops/softmax_attention/cuda/hopper/launch.h"

namespace flashgla::ops::softmax_attention {

namespace {

Support supports(const Problem& problem, const Architecture& architecture) {
  if (architecture.cuda_capability != 90) return Support::no("needs compute capability 9.0");
  if (problem.dtype != DType::bf16 || problem.past != DType::bf16) return Support::no("takes bf16");
  if (problem.key_dim != problem.value_dim || (problem.key_dim != 64 && problem.key_dim != 128)) {
    return Support::no("takes keys and values of 64 or of 128 channels");
  }
  if (problem.dropout) return Support::no("takes no dropout of probabilities");
  if (!problem.regular) return Support::no("takes rows at multiples of 16 bytes and a positive scale");
  return Support::yes();
}

}  // namespace

const Implementation kCudaHopper{"cuda_hopper",          Device::Kind::cuda, supports,   cuda::hopper::forward,
                                 cuda::hopper::backward, cuda::append,       cuda::step, true};

}  // namespace flashgla::ops::softmax_attention
