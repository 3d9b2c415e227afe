// Launches of kernels on a stream, and what kernels need that may begin before the one ahead of them has ended.
#pragma once

#include <cuda_runtime.h>

#include "flashgla/base/cuda/check.h"

namespace flashgla::cuda {

// When a kernel's blocks may begin: once all before it on the stream has ended, or (capability 9.0 alone) beside the
// last blocks of the kernel before it, which hides the launch. Then every block must call wait_for_previous before it
// touches what any other kernel does.
enum class Begin { after_previous, beside_previous };

// From here on, what earlier kernels on the stream wrote may be read, and what they read may be written.
__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Once all blocks have come here or ended, the next kernel's blocks may begin in places that are free, instead of
// waiting for this kernel's end. Measured to pay late in a kernel, where the next one has a block a multiprocessor; it
// did not before one of many small blocks.
__device__ __forceinline__ void release_next() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// The same at a kernel's start. Measured to pay where blocks come in several waves only: with one, it made short calls
// 10% slower.
__device__ __forceinline__ void release_next_of_waves() {
  if (gridDim.x * gridDim.y >= 1024) release_next();
}

// A launch's blocks: a dim3 alone, or with how many neighbours along x, a divisor of their number there, are a cluster,
// which runs at once and whose blocks reach each other's shared memory (capability 9.0 alone).
struct Grid {
  Grid(dim3 size, int together = 1) : blocks(size), cluster(together) {}
  dim3 blocks;
  int cluster;
};

// Queues kernel(arguments...) with `shared` bytes of dynamic shared memory. Throws Error "<name>: ..." when refused.
template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), Grid grid, int threads, int shared, cudaStream_t stream,
            Begin begin, const Arguments&... arguments) {
  if (shared > 48 * 1024) allow_shared_memory(reinterpret_cast<const void*>(kernel), shared, name);
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  config.attrs = attributes;
  if (begin == Begin::beside_previous) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (grid.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(grid.cluster);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  }
  config.gridDim = grid.blocks;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shared);
  config.stream = stream;
  check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), name);
}

}  // namespace flashgla::cuda
