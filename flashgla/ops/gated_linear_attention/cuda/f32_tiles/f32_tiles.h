// f16 and f32 by chunks, in tiles of f32: f32_tiles/README.md.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/params.h"
#include "flashgla/ops/gated_linear_attention/implementations.h"

namespace flashgla::ops::gated_linear_attention::cuda {

// Images of split tiles [chunks, G, key tiles, value tiles], 16 or 24 KiB each: the states of a call.
std::size_t split_states_bytes(const Problem& problem);

// Identity features, no normaliser; aligned rows (aligned_rows.h), any gates. States are kept where params.states is
// given. params as plan_chunks leaves them.
void forward_in_f32_tiles(Context& context, const Problem& problem, const Params& params, bool hopper);
// Whether its blocks have the shared memory they need; else the backward goes token by token.
bool backward_fits_f32_tiles(const Problem& problem, const Architecture& architecture);
void backward_in_f32_tiles(Context& context, const Problem& problem, const Inputs& inputs, const Outputs& outputs,
                           const OutputGradients& d_out, const InputGradients& d_in, bool hopper);

}  // namespace flashgla::ops::gated_linear_attention::cuda
