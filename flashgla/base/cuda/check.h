// The check that every CUDA call goes through.
#pragma once

#include <cuda_runtime_api.h>

namespace flashgla::cuda {

// Throws Error "<what>: <CUDA's words>" unless status is cudaSuccess.
void check(cudaError_t status, const char* what);

// To be called after each kernel launch: reports a launch that was refused.
inline void check_launch(const char* kernel) { check(cudaGetLastError(), kernel); }

}  // namespace flashgla::cuda
