// One decoding token beside a ring on CUDA, as the rows of the operator's table call it. No CUDA types here.
#pragma once

#include "flashgla/ops/gated_linear_attention/implementations.h"

namespace flashgla::ops::gated_linear_attention::cuda {

bool takes_ring(const Problem& problem);
void step_with_ring(Context& context, const Problem& problem, const StepInputs& inputs, const Ring& ring,
                    const TensorView& h, const TensorView& o);
void fold(Context& context, const Ring& ring, const TensorView& h, const TensorView& to);

}  // namespace flashgla::ops::gated_linear_attention::cuda
