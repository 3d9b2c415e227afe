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
// faster then. Such blocks do not begin beside the kernels of feature maps, which let the next ones in at their start:
// they would lie several on one of the multiprocessors that have room.
template <class Core, FusedGate gate, bool kPairs>
void launch(Context& context, const Params& p, const OnePass& form) {
  using flashgla::cuda::Begin;
  const std::int64_t blocks = p.sequences.count * p.heads * p.group * tiles_of(p.value_dim) / form.groups;
  const bool one_each = blocks <= context.architecture().multiprocessors;
  flashgla::cuda::launch("gated_linear_attention forward", fused_kernel<Core, gate, kPairs>,
                         dim3(static_cast<unsigned>(blocks)), form.groups * kGroupThreads,
                         form.groups * kFusedTiles * kTileBytes, static_cast<cudaStream_t>(context.stream()),
                         one_each && form.behind_features ? Begin::after_previous : kNext<Core>, p, one_each);
}

template <class Core, FusedGate gate>
void launch(Context& context, const Params& p, const OnePass& form) {
  if constexpr (std::is_same_v<Core, TensorCore90>) {
    if (form.pairs) return launch<Core, gate, true>(context, p, form);
  }
  launch<Core, gate, false>(context, p, form);
}

template <class Core>
void launch(Context& context, const Params& p, const OnePass& form) {
  switch (p.gate) {
    case GateKind::none:
      return launch<Core, FusedGate::none>(context, p, form);
    case GateKind::constant:
      return launch<Core, FusedGate::constant>(context, p, form);
    case GateKind::scalar:
      return launch<Core, FusedGate::scalar>(context, p, form);
    default:
      return p.gate_dtype == DType::f32 ? launch<Core, FusedGate::f32_key>(context, p, form)
                                        : launch<Core, FusedGate::key>(context, p, form);
  }
}

}  // namespace one_pass

template <class Core>
void launch_fused(Context& context, const Params& p, const OnePass& form) {
  static_assert(kFusedTiles * kTileBytes == kOnePassSharedBytes);
  one_pass::launch<Core>(context, p, form);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
