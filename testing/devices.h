// The devices that tests run on.
#pragma once

#include <cstddef>
#include <vector>

#include "flashgla/base/tensor.h"

namespace flashgla::testing {

// The CPU and the first CUDA device, as far as they are there; only one of them with FLASHGLA_TEST_DEVICE=cpu or =cuda
// in the environment, which throws Error where that one is not there.
std::vector<Device> test_devices();

// Bytes of which every floating type reads NaN.
void fill_with_nan(void* memory, std::size_t bytes, Device device);

// A contiguous tensor's copy in memory of that device.
Tensor copied_to(const TensorView& tensor, Device device);

}  // namespace flashgla::testing
