// Launcher of the one-pass forward.
#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/forward/fused.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/launch.h"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace {

template <class Core, FusedGate gate>
void launch(void* stream, const Params& p) {
  constexpr int bytes = kFusedTiles * kTileBytes;
  const std::int64_t blocks = p.sequences.count * p.heads * p.group * ((p.value_dim + 63) / 64);
  flashgla::cuda::launch("gated_linear_attention forward", fused_kernel<Core, gate>,
                         dim3(static_cast<unsigned>(blocks)), kGroupThreads, bytes, static_cast<cudaStream_t>(stream),
                         flashgla::cuda::Begin::after_previous, p);
}

template <class Core>
void launch(void* stream, const Params& p) {
  switch (p.gate) {
    case GateKind::none:
      return launch<Core, FusedGate::none>(stream, p);
    case GateKind::constant:
      return launch<Core, FusedGate::constant>(stream, p);
    case GateKind::scalar:
      return launch<Core, FusedGate::scalar>(stream, p);
    default:
      return launch<Core, FusedGate::key>(stream, p);
  }
}

}  // namespace

void launch_fused(void* stream, const Params& p, bool hopper) {
  hopper ? launch<TensorCore90>(stream, p) : launch<TensorCore80>(stream, p);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
