#include "testing/devices.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

#include "flashgla/base/error.h"
#include "flashgla/base/memory.h"

namespace flashgla::testing {

std::vector<Device> test_devices() {
  const char* only = std::getenv("FLASHGLA_TEST_DEVICE");
  const std::string wanted = only == nullptr ? "" : only;
  const bool has_cuda = cuda_device_count() > 0;
  if (!wanted.empty() && wanted != "cpu" && !(wanted == "cuda" && has_cuda)) {
    throw Error("FLASHGLA_TEST_DEVICE is '" + wanted + "'; expected cpu, or cuda where there is a CUDA device");
  }
  std::vector<Device> list;
  if (wanted != "cuda") list.push_back(Device::cpu());
  if (wanted != "cpu" && has_cuda) list.push_back(Device::cuda(0));
  return list;
}

void fill_with_nan(void* memory, std::size_t bytes, Device device) {
  if (device.kind == Device::Kind::cpu) {
    std::memset(memory, 0xff, bytes);
    return;
  }
  static const std::vector<unsigned char> ones(std::size_t{1} << 24, 0xff);
  for (std::size_t at = 0; at < bytes; at += ones.size()) {
    copy_memory(static_cast<unsigned char*>(memory) + at, device, ones.data(), Device::cpu(),
                std::min(ones.size(), bytes - at));
  }
}

Tensor copied_to(const TensorView& tensor, Device device) {
  Tensor result = Tensor::empty(tensor.shape, tensor.dtype, device);
  copy_memory(result->data, device, tensor.data, tensor.device, tensor.bytes());
  return result;
}

}  // namespace flashgla::testing
