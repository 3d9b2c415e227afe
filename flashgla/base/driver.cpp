#include "flashgla/base/driver.h"

#ifdef FLASHGLA_CUDA
#include "flashgla/base/cuda/device.h"
#endif

namespace flashgla {

std::string unusable_cuda_driver() {
#ifdef FLASHGLA_CUDA
  return cuda::unusable_driver();
#else
  return {};
#endif
}

}  // namespace flashgla
