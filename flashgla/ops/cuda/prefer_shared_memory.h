// How a multiprocessor's memory is divided between shared memory and the first cache.
#pragma once

#include <cuda_runtime.h>

#include <mutex>
#include <set>
#include <utility>

#include "flashgla/base/cuda/check.h"

namespace flashgla::ops::cuda {

// Asks that a multiprocessor give shared memory all that it can while the kernel's blocks are there, so that the next
// kernel's find room beside them. CUDA is told once for each device.
inline void prefer_shared_memory(const void* kernel, const char* name) {
  static std::mutex mutex;
  static std::set<std::pair<int, const void*>> told;
  int device = 0;
  flashgla::cuda::check(cudaGetDevice(&device), name);
  const std::lock_guard lock(mutex);
  if (told.count({device, kernel}) > 0) return;
  flashgla::cuda::check(
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
      name);
  told.insert({device, kernel});
}

}  // namespace flashgla::ops::cuda
