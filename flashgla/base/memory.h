// Raw memory of a device: the only place that knows how it is had and how it is copied.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "flashgla/base/dtype.h"

namespace flashgla {

// Uninitialised memory, aligned to 64 bytes on CPU and 256 on CUDA, freed with the last pointer.
// Throws Error naming the size when there is not enough, or when this build has no CUDA. On the CPU no more is given
// out in all than host_memory(): the system promises more than it has, and ends a program that uses it.
std::shared_ptr<void> allocate_memory(std::size_t bytes, Device device);

// Host memory that copies to and from CUDA devices need not make the host wait for; without CUDA as that of the CPU.
std::shared_ptr<void> allocate_pinned_memory(std::size_t bytes);

// Bytes that can still be had of a device's own memory; nothing for the CPU, whose memory is the system's to share out.
std::optional<std::size_t> free_memory(Device device);

// Bytes that this process can have of the host: memory and swap, or less where a container is given less.
std::size_t host_memory();

void zero_memory(void* memory, std::size_t bytes, Device device);

// Copies between any two devices; returns when the data has arrived.
void copy_memory(void* dst, Device dst_device, const void* src, Device src_device, std::size_t bytes);

// CUDA devices that this build can use on this machine; 0 when there is none or the build has no CUDA.
int cuda_device_count();

// What the device calls itself, such as "NVIDIA H200"; of a CPU the processor's model, "CPU" where nobody says.
std::string device_name(Device device);

}  // namespace flashgla
