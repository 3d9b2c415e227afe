// Launchers of this folder's kernels: each queues its kernels on the stream and returns. Workspace comes in.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/params.h"

namespace flashgla {
class Context;
}

namespace flashgla::ops::gated_linear_attention::cuda {

// K <= 512. o, states and ht as far as params names them.
void launch_recurrent(void* stream, const Params& params);

// `hopper`: on wgmma, for sm_90a; else on mma.sync.

// bf16, K <= 64, identity features, no normaliser, no gate over values; a key gate in bf16.
void launch_fused(Context& context, const Params& params, bool hopper);

// On Hopper: bf16, K <= 128, as launch_fused otherwise; keeps no states.
void launch_wide_forward(void* stream, const Params& params);

// bf16, any K, as launch_fused otherwise, but key gates in bf16 or f32. Takes its workspace from context.scratch().
void forward_in_two_passes(Context& context, const Params& params, bool hopper);

}  // namespace flashgla::ops::gated_linear_attention::cuda
