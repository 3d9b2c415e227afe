#include "flashgla/base/memory.h"

#include <sys/sysinfo.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "flashgla/base/error.h"
#include "flashgla/base/names.h"
#ifdef FLASHGLA_CUDA
#include "flashgla/base/cuda/device.h"
#endif

namespace flashgla {

namespace {
[[maybe_unused]] [[noreturn]] void no_cuda(Device device) {
  throw Error("device " + name_of(device) + ": this build of flashgla has no CUDA; configure with -DFLASHGLA_CUDA=ON");
}

std::atomic<std::size_t> taken_of_host = 0;  // bytes
}  // namespace

std::shared_ptr<void> allocate_memory(std::size_t bytes, Device device) {
  if (device.kind == Device::Kind::cuda) {
#ifdef FLASHGLA_CUDA
    return cuda::allocate(bytes, device);
#else
    no_cuda(device);
#endif
  }
  constexpr std::size_t kAlignment = 64;
  const std::size_t most = host_memory();
  const std::size_t rounded =
      bytes > most ? bytes : std::max<std::size_t>((bytes + kAlignment - 1) / kAlignment, 1) * kAlignment;
  const std::size_t before = taken_of_host.fetch_add(rounded);
  void* memory = rounded <= most && before <= most - rounded ? std::aligned_alloc(kAlignment, rounded) : nullptr;
  if (memory == nullptr) {
    taken_of_host -= rounded;
    throw Error("not enough memory on cpu for " + std::to_string(bytes) + " bytes beside the " +
                std::to_string(before) + " that are taken; it has " + std::to_string(most));
  }
  return {memory, [rounded](void* pointer) {
            std::free(pointer);
            taken_of_host -= rounded;
          }};
}

std::shared_ptr<void> allocate_pinned_memory(std::size_t bytes) {
#ifdef FLASHGLA_CUDA
  if (cuda_device_count() > 0) return cuda::allocate_pinned(bytes);
#endif
  return allocate_memory(bytes, Device::cpu());
}

std::optional<std::size_t> free_memory([[maybe_unused]] Device device) {
#ifdef FLASHGLA_CUDA
  if (device.kind == Device::Kind::cuda) return cuda::free_memory(device);
#endif
  return std::nullopt;
}

std::size_t host_memory() {
  static const std::size_t bytes = [] {
    struct sysinfo system {};
    ::sysinfo(&system);
    std::size_t most = (static_cast<std::size_t>(system.totalram) + system.totalswap) * system.mem_unit;
    for (const char* file : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
      std::size_t allowed = 0;  // where there is no limit the file holds a word, or more than there is
      if (std::ifstream(file) >> allowed && allowed > 0) most = std::min(most, allowed);
    }
    return most;
  }();
  return bytes;
}

void zero_memory(void* memory, std::size_t bytes, Device device) {
  if (device.kind == Device::Kind::cuda) {
#ifdef FLASHGLA_CUDA
    cuda::zero(memory, bytes, device);
    return;
#else
    no_cuda(device);
#endif
  }
  std::memset(memory, 0, bytes);
}

void copy_memory(void* dst, Device dst_device, const void* src, Device src_device, std::size_t bytes) {
  if (dst_device.kind == Device::Kind::cuda || src_device.kind == Device::Kind::cuda) {
#ifdef FLASHGLA_CUDA
    cuda::copy(dst, src, bytes);
    return;
#else
    no_cuda(dst_device.kind == Device::Kind::cuda ? dst_device : src_device);
#endif
  }
  std::memcpy(dst, src, bytes);
}

int cuda_device_count() {
#ifdef FLASHGLA_CUDA
  return cuda::device_count();
#else
  return 0;
#endif
}

std::string device_name(Device device) {
  if (device.kind == Device::Kind::cuda) {
#ifdef FLASHGLA_CUDA
    return cuda::product_name(device);
#else
    no_cuda(device);
#endif
  }
  std::ifstream processors("/proc/cpuinfo");
  for (std::string line; std::getline(processors, line);) {
    if (line.starts_with("model name") && line.find(": ") != std::string::npos) return line.substr(line.find(": ") + 2);
  }
  return "CPU";
}

}  // namespace flashgla
