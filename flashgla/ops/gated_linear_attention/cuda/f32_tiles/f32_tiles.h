// f16 and f32 by chunks, in tiles of f32: f32_tiles/README.md.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/plan.h"
#include "flashgla/ops/gated_linear_attention/implementations.h"

namespace flashgla::ops::gated_linear_attention::cuda {

// Identity features, no normaliser; aligned rows, any gates. States, images of split tiles [chunks, G, key tiles, value
// tiles] of 16 or 24 KiB each, are kept where params.states is given. params as plan_chunks leaves them.
void forward_in_f32_tiles(Context& context, const Plan& plan, const Params& params);
void backward_in_f32_tiles(Context& context, const Plan& plan, const Params& params, const OutputGradients& d_out,
                           const InputGradients& d_in);

}  // namespace flashgla::ops::gated_linear_attention::cuda
