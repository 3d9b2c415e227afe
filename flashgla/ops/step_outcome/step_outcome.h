// What a step of training leaves behind in the device's memory: its loss, for the host to read when it pleases, and,
// where the step's update was not made, states that are zero again and the place of the first element that was not
// finite. Nothing here makes the host wait. Throw Error naming the argument.
#pragma once

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"

namespace flashgla::ops::step_outcome {

// total = (accumulate ? total : 0) + sum of x; x f32 or f64 [n], total f64 [1]. In f64 and a fixed order, the same on
// every device: the i-th of kLanes sums takes elements i, i + kLanes, ... in turn; then the upper half of the sums is
// added to the lower, until one is left.
constexpr std::int64_t kLanes = 1024;
void sum(Context& context, const TensorView& x, const TensorView& total, bool accumulate);

// view = 0 where made (f64 [1]) is 0, and as it was where not. Any dtype, contiguous.
void clear_unless(Context& context, const TensorView& made, const TensorView& view);

// first (i64 [1]) = the position in x of its first NaN or infinite element, -1 when there is none, or when made (f64
// [1]) is not 0: then x is not looked at. x f32 or f64, contiguous.
void find_unless(Context& context, const TensorView& made, const TensorView& x, const TensorView& first);

}  // namespace flashgla::ops::step_outcome
