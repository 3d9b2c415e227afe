#include "testing/cuda/recording_runtime.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cxxabi.h>

#include <cstdint>
#include <cstdlib>
#include <map>
#include <utility>

namespace {

// What the device is said to be.
struct {
  int capability = 90, shared_memory = 227 * 1024, multiprocessors = 132;
} constexpr recorded_device;
std::vector<std::string> recorded_kernels;
std::uintptr_t next_address = std::uintptr_t{1} << 40;
dim3 configured_grid, configured_block;

// Of host functions that stand for kernels; filled in before main.
std::map<const void*, std::string>& kernel_names() {
  static std::map<const void*, std::string> names;
  return names;
}

std::string readable(const char* mangled) {
  int status = 0;
  char* text = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  std::string name = text != nullptr ? text : mangled;
  std::free(text);
  const std::string unnamed = "(anonymous namespace)::";
  for (std::size_t at; (at = name.find(unnamed)) != std::string::npos;) name.erase(at, unnamed.size());
  return name.substr(0, name.find('('));
}

void record(const void* kernel) { recorded_kernels.push_back(kernel_names()[kernel]); }

template <class T>
cudaError_t give(T* to, T value) {
  *to = value;
  return cudaSuccess;
}

CUresult encode_no_map(CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                       const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  *map = CUtensorMap{};
  return CUDA_SUCCESS;
}

}  // namespace

namespace flashgla::testing {

std::vector<std::string> take_recorded_kernels() { return std::exchange(recorded_kernels, {}); }

}  // namespace flashgla::testing

// What the libraries of this project use of the runtime, and what nvcc puts beside kernels.
extern "C" {
void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* device, int, void*, void*, void*, void*,
                            int*) {
  kernel_names()[host] = readable(device);
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int) {}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t, void*) {
  configured_grid = grid;
  configured_block = block;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared, void* stream) {
  *shared = 0;
  *static_cast<void**>(stream) = nullptr;
  *block = configured_block;
  return give(grid, configured_grid);
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  return give(kernel, reinterpret_cast<cudaKernel_t>(const_cast<void*>(function)));
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, std::size_t, cudaStream_t) {
  record(kernel);
  return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* kernel, void**) {
  record(kernel);
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) { return give(count, 1); }
cudaError_t cudaGetDevice(int* device) { return give(device, 0); }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return give(version, CUDART_VERSION); }
cudaError_t cudaRuntimeGetVersion(int* version) { return give(version, CUDART_VERSION); }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      return give(value, recorded_device.capability / 10);
    case cudaDevAttrComputeCapabilityMinor:
      return give(value, recorded_device.capability % 10);
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return give(value, recorded_device.shared_memory);
    case cudaDevAttrMultiProcessorCount:
      return give(value, recorded_device.multiprocessors);
    default:
      return give(value, 0);
  }
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) { return give(properties, cudaDeviceProp{}); }
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  *free = std::size_t{1} << 37;
  return give(total, *free);
}
cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  *memory = reinterpret_cast<void*>(next_address);
  next_address += (bytes + 511) / 512 * 512;
  return cudaSuccess;
}
cudaError_t cudaFree(void*) { return cudaSuccess; }
cudaError_t cudaMallocHost(void** memory, std::size_t bytes) { return give(memory, std::malloc(bytes)); }
cudaError_t cudaFreeHost(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaMemset(void*, int, std::size_t) { return cudaSuccess; }
cudaError_t cudaMemsetAsync(void*, int, std::size_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaMemcpy(void*, const void*, std::size_t, cudaMemcpyKind) { return cudaSuccess; }
cudaError_t cudaMemcpyAsync(void*, const void*, std::size_t, cudaMemcpyKind, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "no error"; }
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  return give(attributes, cudaFuncAttributes{});
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, std::size_t,
                                                                   unsigned) {
  return give(blocks, 1);
}
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *function = reinterpret_cast<void*>(&encode_no_map);
  return give(found, cudaDriverEntryPointSuccess);
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return give(stream, cudaStream_t{}); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) { return cudaSuccess; }
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) { return give(graph, cudaGraph_t{}); }
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* graph, cudaGraph_t, unsigned long long) {
  return give(graph, cudaGraphExec_t{});
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t* event) { return give(event, cudaEvent_t{}); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return give(event, cudaEvent_t{}); }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) { return give(milliseconds, 0.0f); }
}
