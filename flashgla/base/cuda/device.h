// CUDA memory and device facts.
#pragma once

#include <memory>

#include "flashgla/base/context.h"

namespace flashgla::cuda {

Architecture architecture_of(Device device);
std::shared_ptr<void> allocate(std::size_t bytes, Device device);
void zero(void* memory, std::size_t bytes, Device device);
void copy(void* dst, Device dst_device, const void* src, Device src_device, std::size_t bytes);
int device_count();

}  // namespace flashgla::cuda
