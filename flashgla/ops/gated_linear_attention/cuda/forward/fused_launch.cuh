// Launcher of the one-pass forward; instantiations/ has one source a core.
#pragma once

#include "flashgla/base/context.h"
#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/forward/fused.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/launch.h"
#include "flashgla/ops/gated_linear_attention/cuda/limits.h"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace one_pass {

// Rows are asked for early where a multiprocessor has one block: two have enough under way, and asking in step is
// faster then.
template <class Core, FusedGate gate, bool kPairs>
void launch(Context& context, const Params& p, int groups) {
  const std::int64_t blocks = p.sequences.count * p.heads * p.group * tiles_of(p.value_dim) / groups;
  flashgla::cuda::launch("gated_linear_attention forward", fused_kernel<Core, gate, kPairs>,
                         dim3(static_cast<unsigned>(blocks)), groups * kGroupThreads, groups * kFusedTiles * kTileBytes,
                         static_cast<cudaStream_t>(context.stream()), kNext<Core>, p,
                         blocks <= context.architecture().multiprocessors);
}

template <class Core, FusedGate gate>
void launch(Context& context, const Params& p, int groups, bool pairs) {
  if constexpr (std::is_same_v<Core, TensorCore90>) {
    if (pairs) return launch<Core, gate, true>(context, p, groups);
  }
  launch<Core, gate, false>(context, p, groups);
}

template <class Core>
void launch(Context& context, const Params& p, int groups, bool pairs) {
  switch (p.gate) {
    case GateKind::none:
      return launch<Core, FusedGate::none>(context, p, groups, pairs);
    case GateKind::constant:
      return launch<Core, FusedGate::constant>(context, p, groups, pairs);
    case GateKind::scalar:
      return launch<Core, FusedGate::scalar>(context, p, groups, pairs);
    default:
      return p.gate_dtype == DType::f32 ? launch<Core, FusedGate::f32_key>(context, p, groups, pairs)
                                        : launch<Core, FusedGate::key>(context, p, groups, pairs);
  }
}

}  // namespace one_pass

template <class Core>
void launch_fused(Context& context, const Params& p, int groups, bool pairs) {
  static_assert(kFusedTiles * kTileBytes == kOnePassSharedBytes);
  one_pass::launch<Core>(context, p, groups, pairs);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
