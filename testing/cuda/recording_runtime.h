// A CUDA runtime without a device, for programs that link it in place of the real one: it gives out addresses that
// nothing may touch, and writes down which kernels are launched. So tests see what host code would run on any device.
#pragma once

#include <string>
#include <vector>

namespace flashgla::testing {

// Names of the kernels launched since the last call, without parameters.
std::vector<std::string> take_recorded_kernels();

}  // namespace flashgla::testing
