// How many tokens each sequence has had, in the device's memory, so that nothing waits for the host.
#pragma once

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"

namespace flashgla::ops::positions {

// positions[n] += bounds[n+1] - bounds[n], or += length without bounds. positions i32 [N] and bounds i32 [N+1]
// contiguous. Throws Error naming the argument.
void advance(Context& context, const TensorView& positions, const TensorView& bounds, std::int64_t length);

// out[b,t] = positions[b] + t; with bounds out is [1,T], and of a token t of sequence n positions[n] + t - bounds[n].
// out i32 [B,T] contiguous; positions absent: zeros.
void of_tokens(Context& context, const TensorView& positions, const TensorView& bounds, const TensorView& out);

}  // namespace flashgla::ops::positions
