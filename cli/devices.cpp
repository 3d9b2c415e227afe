#include "cli/devices.h"

#include <fmt/core.h>

#include <cstdio>

#include "flashgla/base/driver.h"
#include "flashgla/base/names.h"

namespace flashgla::cli {

Device chosen_device(const std::string& name) {
  const Device device = device_from_name(name);
  if (name == "auto" && device == Device::cpu()) {
    if (const std::string why = unusable_cuda_driver(); !why.empty()) {
      fmt::print(stderr, "flashgla: running on the CPU: {}\n", why);
    }
  }
  return device;
}

}  // namespace flashgla::cli
