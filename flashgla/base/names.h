// Element types and devices as users write them, and what they may have meant by a name that is none.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "flashgla/base/dtype.h"

namespace flashgla {

// Inverse of name_of, also accepting "float32", "bfloat16", "fp32" and the like. Throws Error.
DType dtype_from_name(std::string_view name);

// "cpu" or "cuda:0".
std::string name_of(Device device);

// Inverse of name_of; "cuda" means "cuda:0", "auto" the first CUDA device, or the CPU where there is none. Throws
// Error.
Device device_from_name(std::string_view name);

// Of `known` the one that differs from `name` in the fewest letters; empty where none is near enough to be meant.
std::string nearest_name(std::string_view name, const std::vector<std::string>& known);
// For an error's end: "; did you mean 'hidden_size'?", or nothing.
std::string did_you_mean(std::string_view name, const std::vector<std::string>& known);

}  // namespace flashgla
