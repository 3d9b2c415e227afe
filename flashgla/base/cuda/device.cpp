#include "flashgla/base/cuda/device.h"

#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "flashgla/base/cuda/check.h"
#include "flashgla/base/names.h"

namespace flashgla::cuda {

namespace {
cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t event_of(void* event) { return static_cast<cudaEvent_t>(event); }
}  // namespace

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // it is reported here, not by whoever asks next
  throw Error(std::string(what) + ": " + cudaGetErrorString(status));
}

void allow_shared_memory(const void* kernel, int bytes, const char* name) {
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, int> allowed;
  int device = 0;
  check(cudaGetDevice(&device), name);
  const std::lock_guard lock(mutex);  // also while CUDA is told, or less might follow more
  int& most = allowed[{device, kernel}];
  if (bytes <= most) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), name);
  most = bytes;
}

int device_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

std::string unusable_driver() {
  int driver = 0, runtime = 0, count = 0;
  cudaDriverGetVersion(&driver);
  if (driver == 0) return {};  // none
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess || status == cudaErrorNoDevice) return {};
  if (status != cudaErrorInsufficientDriver)
    return std::string("the NVIDIA driver says: ") + cudaGetErrorString(status);
  cudaRuntimeGetVersion(&runtime);
  const auto version = [](int number) {
    return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
  };
  return "the NVIDIA driver is for CUDA " + version(driver) + " and this program for " + version(runtime) +
         "; update the driver";
}

void require_device(Device device) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  const std::string name = "device " + name_of(device) + ": ";
  if (const std::string why = unusable_driver(); !why.empty()) throw Error(name + why);
  if (status == cudaErrorInsufficientDriver) {
    throw Error(name + "no NVIDIA driver found; install one (nvidia-smi shows it), or --device cpu runs without a GPU");
  }
  if (status != cudaSuccess || count == 0) throw Error(name + "no CUDA device found; --device cpu runs without one");
  if (device.index < 0 || device.index >= count) {
    throw Error(name + "there " + (count == 1 ? "is cuda:0 alone" : "are cuda:0 to cuda:" + std::to_string(count - 1)));
  }
}

Architecture architecture_of(Device device) {
  require_device(device);
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, which, device.index), ("device " + name_of(device)).c_str());
    return value;
  };
  Architecture architecture;
  architecture.device = Device::Kind::cuda;
  architecture.cuda_capability =
      attribute(cudaDevAttrComputeCapabilityMajor) * 10 + attribute(cudaDevAttrComputeCapabilityMinor);
  architecture.shared_memory = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  architecture.multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
  architecture.matrix_units = architecture.cuda_capability >= 80;
  return architecture;
}

std::string product_name(Device device) {
  require_device(device);
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device.index), ("device " + name_of(device)).c_str());
  return properties.name;
}

void make_current(Device device) {
  int current = -1;
  check(cudaGetDevice(&current), "cudaGetDevice");
  if (current != device.index) check(cudaSetDevice(device.index), "cudaSetDevice");
}

int exchange_current(int index) {
  int before = -1;
  cudaError_t status = cudaGetDevice(&before);
  if (status == cudaSuccess && before == index) return -1;
  if (status == cudaSuccess) status = cudaSetDevice(index);
  if (status == cudaSuccess) return before;
  cudaGetLastError();  // the next call on the device reports it
  return -1;
}

std::size_t free_memory(Device device) {
  make_current(device);
  std::size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return free;
}

std::shared_ptr<void> allocate(std::size_t bytes, Device device) {
  make_current(device);
  void* memory = nullptr;
  const cudaError_t status = cudaMalloc(&memory, bytes == 0 ? 1 : bytes);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // it is reported here
    std::size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    throw Error("not enough memory on " + name_of(device) + " for " + std::to_string(bytes) +
                " bytes: " + std::to_string(free) + " of " + std::to_string(total) +
                " are free; nvidia-smi shows who holds the rest, and less is needed with a smaller batch or model");
  }
  check(status, ("allocating " + std::to_string(bytes) + " bytes on " + name_of(device)).c_str());
  return {memory, [](void* pointer) { cudaFree(pointer); }};
}

std::shared_ptr<void> allocate_pinned(std::size_t bytes) {
  void* memory = nullptr;
  check(cudaMallocHost(&memory, bytes == 0 ? 1 : bytes),
        ("allocating " + std::to_string(bytes) + " bytes of pinned host memory").c_str());
  return {memory, [](void* pointer) { cudaFreeHost(pointer); }};
}

// cudaMemset, and cudaMemcpy from memory that is not pinned, return before they are done. What follows on a lane for
// copies would not wait for them.
static void wait_for_own_stream() { check(cudaStreamSynchronize(cudaStreamLegacy), "cudaStreamSynchronize"); }

void zero(void* memory, std::size_t bytes, Device device) {
  make_current(device);
  check(cudaMemset(memory, 0, bytes), "cudaMemset");
  wait_for_own_stream();
}

void copy(void* dst, const void* src, std::size_t bytes) {
  check(cudaMemcpy(dst, src, bytes, cudaMemcpyDefault), "cudaMemcpy");
  wait_for_own_stream();
}

void* create_stream(Device device, bool ordered) {
  make_current(device);
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, ordered ? cudaStreamDefault : cudaStreamNonBlocking), "cudaStreamCreate");
  return stream;
}
void destroy_stream(void* stream) {
  cudaStreamSynchronize(stream_of(stream));  // copies of copy_memory do not wait for a stream that is no more
  cudaStreamDestroy(stream_of(stream));
}
void synchronize_stream(void* stream) { check(cudaStreamSynchronize(stream_of(stream)), "cudaStreamSynchronize"); }
void zero_queued(void* memory, std::size_t bytes, void* stream) {
  check(cudaMemsetAsync(memory, 0, bytes, stream_of(stream)), "cudaMemsetAsync");
}
void copy_queued(void* dst, const void* src, std::size_t bytes, void* stream) {
  check(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, stream_of(stream)), "cudaMemcpyAsync");
}

void* create_event(Device device, bool timing) {
  make_current(device);
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, timing ? cudaEventDefault : cudaEventDisableTiming), "cudaEventCreate");
  return event;
}
void destroy_event(void* event) { cudaEventDestroy(event_of(event)); }
void record_event(void* event, void* stream) {
  check(cudaEventRecord(event_of(event), stream_of(stream)), "cudaEventRecord");
}
void hold_back_stream(void* stream, void* event) {
  check(cudaStreamWaitEvent(stream_of(stream), event_of(event)), "cudaStreamWaitEvent");
}
bool event_passed(void* event) {
  const cudaError_t status = cudaEventQuery(event_of(event));
  if (status != cudaErrorNotReady) check(status, "cudaEventQuery");
  return status == cudaSuccess;
}
void synchronize_event(void* event) { check(cudaEventSynchronize(event_of(event)), "cudaEventSynchronize"); }
double elapsed_milliseconds(void* begin, void* end) {
  float milliseconds = 0.0f;
  check(cudaEventElapsedTime(&milliseconds, event_of(begin), event_of(end)), "cudaEventElapsedTime");
  return static_cast<double>(milliseconds);
}

void begin_recording(void* stream) {
  check(cudaStreamBeginCapture(stream_of(stream), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
}
void* end_recording(void* stream) {
  cudaGraph_t recorded = nullptr;
  check(cudaStreamEndCapture(stream_of(stream), &recorded), "cudaStreamEndCapture");
  cudaGraphExec_t graph = nullptr;
  const cudaError_t status = cudaGraphInstantiate(&graph, recorded, 0);
  cudaGraphDestroy(recorded);
  check(status, "cudaGraphInstantiate");
  return graph;
}
void abandon_recording(void* stream) {
  cudaGraph_t recorded = nullptr;
  if (cudaStreamEndCapture(stream_of(stream), &recorded) == cudaSuccess && recorded) cudaGraphDestroy(recorded);
  cudaGetLastError();  // what broke the recording is reported by who threw
}
void launch_graph(void* graph, void* stream) {
  check(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), stream_of(stream)), "cudaGraphLaunch");
}
void destroy_graph(void* graph) { cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)); }

}  // namespace flashgla::cuda
