// Launchers of this folder's kernels: each queues its kernels on the stream and returns. Workspace comes in.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/params.h"

namespace flashgla::ops::gated_linear_attention::cuda {

// K <= 512. o, states and ht as far as params names them.
void launch_recurrent(void* stream, const Params& params);

// `hopper`: on wgmma, for sm_90a; else on mma.sync.

// bf16, K <= 64, identity features, no normaliser, no gate over values; a key gate in bf16.
void launch_fused(void* stream, const Params& params, bool hopper);

// bf16, K <= 256, as launch_fused otherwise, but key gates in bf16 or f32; where two_passes_fit. Takes its workspace
// from context.scratch().
void forward_in_two_passes(Context& context, const Params& params, bool hopper);

// Whether a block of the device has the shared memory: always on capability 8.0 and 9.0, with 99 KiB up to K = 128.
bool two_passes_fit(const Context& context, const Params& params);

}  // namespace flashgla::ops::gated_linear_attention::cuda
