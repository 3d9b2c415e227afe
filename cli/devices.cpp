#include "cli/devices.h"

#include <cstdio>

#include "cli/say.h"
#include "flashgla/base/driver.h"
#include "flashgla/base/names.h"

namespace flashgla::cli {

Device chosen_device(const std::string& name) {
  const Device device = device_from_name(name);
  if (name == "auto" && device == Device::cpu()) {
    if (const std::string why = unusable_cuda_driver(); !why.empty()) {
      say("flashgla: running on the CPU: {}\n", why);
    }
  }
  return device;
}

}  // namespace flashgla::cli
