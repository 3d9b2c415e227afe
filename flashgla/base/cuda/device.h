// CUDA memory and device facts, and the check that every CUDA call goes through.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "flashgla/base/context.h"

namespace flashgla::cuda {

// Throws Error "<what>: <CUDA's words>" unless status is cudaSuccess.
void check(cudaError_t status, const char* what);

// To be called after each kernel launch: reports a launch that was refused.
inline void check_launch(const char* kernel) { check(cudaGetLastError(), kernel); }

Architecture architecture_of(Device device);
std::shared_ptr<void> allocate(std::size_t bytes, Device device);
void zero(void* memory, std::size_t bytes, Device device);
void copy(void* dst, Device dst_device, const void* src, Device src_device, std::size_t bytes);
int device_count();

}  // namespace flashgla::cuda
