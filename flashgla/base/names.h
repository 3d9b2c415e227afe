// Element types and devices as users write them.
#pragma once

#include <string>
#include <string_view>

#include "flashgla/base/dtype.h"

namespace flashgla {

// Inverse of name_of, also accepting "float32", "bfloat16", "fp32" and the like. Throws Error.
DType dtype_from_name(std::string_view name);

// "cpu" or "cuda:0".
std::string name_of(Device device);

// Inverse of name_of; "cuda" means "cuda:0", "auto" the first CUDA device, or the CPU where there is none. Throws
// Error.
Device device_from_name(std::string_view name);

}  // namespace flashgla
