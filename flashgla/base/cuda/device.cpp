#include "flashgla/base/cuda/device.h"

#include <string>

#include "flashgla/base/cuda/check.h"
#include "flashgla/base/names.h"

namespace flashgla::cuda {

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw Error(std::string(what) + ": " + cudaGetErrorString(status));
}

Architecture architecture_of(Device device) {
  if (const int count = device_count(); device.index >= count) {
    throw Error("device " + name_of(device) + ": " +
                (count == 0 ? "no CUDA device or driver found" : "the last one is cuda:" + std::to_string(count - 1)));
  }
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device.index), ("device " + name_of(device)).c_str());
  Architecture architecture;
  architecture.device = Device::Kind::cuda;
  architecture.cuda_capability = properties.major * 10 + properties.minor;
  architecture.shared_memory = static_cast<std::int64_t>(properties.sharedMemPerBlockOptin);
  architecture.multiprocessors = properties.multiProcessorCount;
  return architecture;
}

std::shared_ptr<void> allocate(std::size_t bytes, Device device) {
  check(cudaSetDevice(device.index), "cudaSetDevice");
  void* memory = nullptr;
  check(cudaMalloc(&memory, bytes == 0 ? 1 : bytes),
        ("allocating " + std::to_string(bytes) + " bytes on " + name_of(device)).c_str());
  return {memory, [](void* pointer) { cudaFree(pointer); }};
}

void zero(void* memory, std::size_t bytes, Device device) {
  check(cudaSetDevice(device.index), "cudaSetDevice");
  check(cudaMemset(memory, 0, bytes), "cudaMemset");
}

void copy(void* dst, Device, const void* src, Device, std::size_t bytes) {
  check(cudaMemcpy(dst, src, bytes, cudaMemcpyDefault), "cudaMemcpy");
}

int device_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

}  // namespace flashgla::cuda
