#include "flashgla/base/current_device.h"

#ifdef FLASHGLA_CUDA
#include "flashgla/base/cuda/device.h"
#endif

namespace flashgla {

#ifdef FLASHGLA_CUDA

CurrentDevice::CurrentDevice(Device device) {
  if (device.kind == Device::Kind::cuda) before_ = cuda::exchange_current(device.index);
}
CurrentDevice::~CurrentDevice() {
  if (before_ >= 0) cuda::exchange_current(before_);
}

#else

CurrentDevice::CurrentDevice(Device) {}
CurrentDevice::~CurrentDevice() = default;

#endif

}  // namespace flashgla
