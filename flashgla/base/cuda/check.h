// The check that every CUDA call goes through, and what launches are to remember.
#pragma once

#include <cuda_runtime_api.h>

namespace flashgla::cuda {

// Throws Error "<what>: <CUDA's words>" unless status is cudaSuccess.
void check(cudaError_t status, const char* what);

// To be called after each kernel launch: reports a launch that was refused.
inline void check_launch(const char* kernel) { check(cudaGetLastError(), kernel); }

// Lets a kernel have so many bytes of dynamic shared memory on the current device. CUDA is told when it is more than
// before, for that takes as long as a fifth of a launch. From any thread. Throws Error "<name>: ..." when refused.
void allow_shared_memory(const void* kernel, int bytes, const char* name);

}  // namespace flashgla::cuda
