// Which library computes softmax attention: what a run keeps, so that who goes on with it knows whether bits are the
// same.
#pragma once

#include <string>

#include "flashgla/base/context.h"

namespace flashgla::ops::softmax_attention {

// "cuDNN 9.19.0" where a call of this context was, or in a dry run would have been, given to it; else empty.
std::string library_of(Context& context);

// One line for the user where a run goes on by another library than before; empty where it is the same. Both as
// library_of says them.
std::string notice_of_change(const std::string& before, const std::string& now);

// What computes on the context's device, tried on a small graph: "cuDNN 9.19.0 where it is faster, else FlashGLA's
// kernels", or "FlashGLA's kernels; not cuDNN: " and why.
std::string describe_library(Context& context);

}  // namespace flashgla::ops::softmax_attention
