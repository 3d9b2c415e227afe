// Launcher of the one-pass forward.
#include "flashgla/base/cuda/device.h"
#include "flashgla/ops/gated_linear_attention/cuda/fused.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/launch.h"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace {

template <class Core, FusedGate gate>
void launch(void* stream, const Params& p) {
  constexpr int bytes = kFusedTiles * kTileBytes;
  auto* kernel = fused_kernel<Core, gate>;
  flashgla::cuda::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                        "fused_kernel's shared memory");
  const std::int64_t blocks = p.sequences.count * p.heads * p.group * ((p.value_dim + 63) / 64);
  kernel<<<static_cast<unsigned>(blocks), kGroupThreads, bytes, static_cast<cudaStream_t>(stream)>>>(p);
  flashgla::cuda::check_launch("fused_kernel");
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
