#include "flashgla/base/cuda/check.h"
#include "flashgla/ops/positions/cuda/advance.h"

namespace flashgla::ops::positions::cuda {

namespace {

__global__ void advance_kernel(std::int32_t* positions, const std::int32_t* bounds, std::int64_t sequences,
                               std::int32_t length) {
  const std::int64_t n = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (n < sequences) positions[n] += bounds != nullptr ? bounds[n + 1] - bounds[n] : length;
}

}  // namespace

void advance(std::int32_t* positions, const std::int32_t* bounds, std::int64_t sequences, std::int32_t length,
             void* stream) {
  if (sequences == 0) return;
  constexpr int kThreads = 128;
  const auto blocks = static_cast<unsigned>((sequences + kThreads - 1) / kThreads);
  advance_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(positions, bounds, sequences, length);
  flashgla::cuda::check_launch("positions");
}

}  // namespace flashgla::ops::positions::cuda
