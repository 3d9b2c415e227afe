// What keeps a machine's GPU from being used.
#pragma once

#include <string>

namespace flashgla {

// Why the NVIDIA driver of this machine gives no device, and the remedy; "" where it gives one, where there is no
// driver, or when this build has no CUDA.
std::string unusable_cuda_driver();

}  // namespace flashgla
