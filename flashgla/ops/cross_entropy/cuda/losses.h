// Launch of the operator's kernel.
#pragma once

#include "flashgla/base/context.h"

namespace flashgla::ops::cross_entropy::cuda {

// Losses of rows of logits [rows,V] (f32 or bf16; rows begin at multiples of 16 bytes, what stands between them may be
// overwritten) and, with `gradient`, in their place the gradient of scale * sum(losses). A target below 0 or beyond the
// words is an ignored row: its gradient is 0 and its loss 0 for -1, NaN for others, which are noted in `bad_target`
// (null: nowhere) as first_row + row + 1.
void take_losses(Context& context, const TensorView& logits, const std::int32_t* targets, float* losses, bool gradient,
                 double scale, std::int32_t* bad_target, std::int64_t first_row);

// hits = 1 where the target's logit is above all others of its row, else 0; from the logits, before they are gradients.
void take_hits(Context& context, const TensorView& logits, const std::int32_t* targets, float* hits);

}  // namespace flashgla::ops::cross_entropy::cuda
