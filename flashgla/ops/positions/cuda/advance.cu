#include "flashgla/base/cuda/check.h"
#include "flashgla/ops/positions/cuda/advance.h"

namespace flashgla::ops::positions::cuda {

namespace {

__global__ void advance_kernel(std::int32_t* positions, const std::int32_t* bounds, std::int64_t sequences,
                               std::int32_t length) {
  const std::int64_t n = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (n < sequences) positions[n] += bounds != nullptr ? bounds[n + 1] - bounds[n] : length;
}

__global__ void of_tokens_kernel(const std::int32_t* before, const std::int32_t* bounds, std::int64_t sequences,
                                 std::int32_t* out, std::int64_t tokens, std::int64_t length) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= tokens) return;
  std::int64_t n = bounds != nullptr ? 0 : i / length;
  if (bounds != nullptr) {  // the last sequence that begins at or before it
    for (std::int64_t end = sequences; end - n > 1;) {
      const std::int64_t middle = (n + end) / 2;
      (bounds[middle] <= i ? n : end) = middle;
    }
  }
  const std::int64_t begin = bounds != nullptr ? bounds[n] : n * length;
  out[i] = static_cast<std::int32_t>((before != nullptr ? before[n] : 0) + i - begin);
}

constexpr int kThreads = 128;
unsigned blocks_of(std::int64_t items) { return static_cast<unsigned>((items + kThreads - 1) / kThreads); }

}  // namespace

void of_tokens(const std::int32_t* before, const std::int32_t* bounds, std::int64_t sequences, std::int32_t* out,
               std::int64_t tokens, std::int64_t length, void* stream) {
  if (tokens == 0) return;
  of_tokens_kernel<<<blocks_of(tokens), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(before, bounds, sequences,
                                                                                          out, tokens, length);
  flashgla::cuda::check_launch("positions");
}

void advance(std::int32_t* positions, const std::int32_t* bounds, std::int64_t sequences, std::int32_t length,
             void* stream) {
  if (sequences == 0) return;
  advance_kernel<<<blocks_of(sequences), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(positions, bounds, sequences,
                                                                                           length);
  flashgla::cuda::check_launch("positions");
}

}  // namespace flashgla::ops::positions::cuda
