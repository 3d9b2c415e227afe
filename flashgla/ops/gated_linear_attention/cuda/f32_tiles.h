// Launchers of the recurrence in f32 tiles (f32_tiles.cuh): queue their kernel on the stream and return.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/params.h"

namespace flashgla::ops::gated_linear_attention::cuda {

struct RecurrentPass;

// Whether a block's state over `keys` channels and its tiles fit the shared memory that it may use.
bool f32_tiles_fit(int keys, std::int64_t shared_memory);

// The forward: identity features, no normaliser, no gate over values; any dtype. split: f32 products in three of tf32,
// else operands are rounded to tf32.
void launch_f32_tiles(void* stream, const Params& params, bool split);

// A pass of the recurrent backward that has gates on one side at most, no normaliser; products in three of tf32.
void launch_f32_tiles(void* stream, const Params& params, const RecurrentPass& pass);

}  // namespace flashgla::ops::gated_linear_attention::cuda
