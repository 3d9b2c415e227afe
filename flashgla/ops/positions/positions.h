// How many tokens each sequence has had, in the device's memory, so that nothing waits for the host.
#pragma once

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"

namespace flashgla::ops::positions {

// positions[n] += bounds[n+1] - bounds[n], or += length without bounds. positions i32 [N] and bounds i32 [N+1]
// contiguous. Throws Error naming the argument.
void advance(Context& context, const TensorView& positions, const TensorView& bounds, std::int64_t length);

}  // namespace flashgla::ops::positions
