// Draws made by a kernel, for the test that compares their bits with the CPU's.
#include "flashgla/base/cuda/check.h"
#include "flashgla/base/cuda/tests/random_draws.h"

namespace flashgla::random {

namespace {

__global__ void draw_kernel(Stream stream, std::int64_t pairs, double* normals, double* uniforms,
                            std::uint64_t* below) {
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; i < pairs;
       i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    const Normals both = stream.normals(static_cast<std::uint64_t>(i));
    normals[2 * i] = both.first;
    normals[2 * i + 1] = both.second;
    uniforms[i] = stream.uniform(static_cast<std::uint64_t>(i));
    below[i] = stream.below(static_cast<std::uint64_t>(i), 1000003);
  }
}

}  // namespace

void draw_on_cuda(const Stream& stream, std::int64_t pairs, double* normals, double* uniforms, std::uint64_t* below) {
  draw_kernel<<<1024, 256>>>(stream, pairs, normals, uniforms, below);
  cuda::check_launch("draw_kernel");
  cuda::check(cudaDeviceSynchronize(), "draw_kernel");
}

}  // namespace flashgla::random
