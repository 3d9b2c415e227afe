#pragma once

#include <cstdint>

#include "flashgla/base/random.h"

namespace flashgla::random {

// Into device memory, draws 0 .. pairs - 1: normals [2 pairs], uniforms [pairs], numbers below 1000003 [pairs].
void draw_on_cuda(const Stream& stream, std::int64_t pairs, double* normals, double* uniforms, std::uint64_t* below);

}  // namespace flashgla::random
