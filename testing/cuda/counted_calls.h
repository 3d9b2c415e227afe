// Counts what a loop may not ask of CUDA: memory, a wait for everything, a copy that waits or is of the default stream
// (which all others wait for). Included once by a test program that is linked with flashgla_count_cuda_calls
// (testing/CMakeLists.txt), whose own calls then come here.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>

namespace flashgla::testing {
inline std::atomic<int> cuda_calls{0};
}

#define FLASHGLA_COUNT(name, parameters, arguments) \
  cudaError_t __real_##name parameters;             \
  cudaError_t __wrap_##name parameters {            \
    ++flashgla::testing::cuda_calls;                \
    return __real_##name arguments;                 \
  }

extern "C" {
FLASHGLA_COUNT(cudaMalloc, (void** memory, size_t bytes), (memory, bytes))
FLASHGLA_COUNT(cudaFree, (void* memory), (memory))
FLASHGLA_COUNT(cudaMallocAsync, (void** memory, size_t bytes, cudaStream_t stream), (memory, bytes, stream))
FLASHGLA_COUNT(cudaFreeAsync, (void* memory, cudaStream_t stream), (memory, stream))
FLASHGLA_COUNT(cudaMallocManaged, (void** memory, size_t bytes, unsigned flags), (memory, bytes, flags))
FLASHGLA_COUNT(cudaMallocHost, (void** memory, size_t bytes), (memory, bytes))
FLASHGLA_COUNT(cudaHostAlloc, (void** memory, size_t bytes, unsigned flags), (memory, bytes, flags))
FLASHGLA_COUNT(cudaHostRegister, (void* memory, size_t bytes, unsigned flags), (memory, bytes, flags))
FLASHGLA_COUNT(cudaFreeHost, (void* memory), (memory))
FLASHGLA_COUNT(cudaMemcpy, (void* to, const void* from, size_t bytes, cudaMemcpyKind kind), (to, from, bytes, kind))
FLASHGLA_COUNT(cudaMemset, (void* memory, int value, size_t bytes), (memory, value, bytes))
FLASHGLA_COUNT(cudaDeviceSynchronize, (void), ())
FLASHGLA_COUNT(cudaStreamSynchronize, (cudaStream_t stream), (stream))
FLASHGLA_COUNT(cudaStreamCreateWithFlags, (cudaStream_t * stream, unsigned flags), (stream, flags))

cudaError_t __real_cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t __wrap_cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  if (stream == nullptr || stream == cudaStreamLegacy) ++flashgla::testing::cuda_calls;
  return __real_cudaMemcpyAsync(to, from, bytes, kind, stream);
}
cudaError_t __real_cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream);
cudaError_t __wrap_cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  if (stream == nullptr || stream == cudaStreamLegacy) ++flashgla::testing::cuda_calls;
  return __real_cudaMemsetAsync(memory, value, bytes, stream);
}
}

#undef FLASHGLA_COUNT
