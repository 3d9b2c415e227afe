// Launcher of the one-pass forward.
#include "flashgla/base/context.h"
#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/forward/fused.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/launch.h"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace {

// Two groups a block where each sequence has an even number of them and no multiprocessor gets more groups for it.
int groups_a_block(const Architecture& device, const Params& p) {
  const std::int64_t of_sequence = p.heads * p.group * tiles_of(p.value_dim), all = p.sequences.count * of_sequence;
  const auto most = [&](std::int64_t together) {
    return (all / together + device.multiprocessors - 1) / device.multiprocessors * together;
  };
  const bool fits = device.shared_memory >= 2 * kFusedTiles * kTileBytes;
  return fits && of_sequence % 2 == 0 && most(2) <= most(1) ? 2 : 1;
}

// Neighbouring heads' rows lie side by side in every tensor that is moved by tiles, and no two share a state.
bool side_by_side(const Params& p) {
  return p.key_dim == kTile && p.value_dim == kTile && p.group == 1 && p.q.head == kTile && p.k.head == kTile &&
         p.v.head == kTile && p.o.head == kTile && (p.gate != GateKind::key || p.g.head == kTile);
}

// Rows are asked for early where a multiprocessor has one block: two have enough under way, and asking in step is
// faster then.
template <class Core, FusedGate gate, bool kPairs>
void launch(Context& context, const Params& p, int groups) {
  const std::int64_t blocks = p.sequences.count * p.heads * p.group * tiles_of(p.value_dim) / groups;
  flashgla::cuda::launch("gated_linear_attention forward", fused_kernel<Core, gate, kPairs>,
                         dim3(static_cast<unsigned>(blocks)), groups * kGroupThreads, groups * kFusedTiles * kTileBytes,
                         static_cast<cudaStream_t>(context.stream()), flashgla::cuda::Begin::after_previous, p,
                         blocks <= context.architecture().multiprocessors);
}

template <class Core, FusedGate gate>
void launch(Context& context, const Params& p) {
  const int groups = groups_a_block(context.architecture(), p);
  if constexpr (std::is_same_v<Core, TensorCore90>) {
    if (groups == 2 && side_by_side(p)) return launch<Core, gate, true>(context, p, groups);
  }
  launch<Core, gate, false>(context, p, groups);
}

template <class Core>
void launch(Context& context, const Params& p) {
  switch (p.gate) {
    case GateKind::none:
      return launch<Core, FusedGate::none>(context, p);
    case GateKind::constant:
      return launch<Core, FusedGate::constant>(context, p);
    case GateKind::scalar:
      return launch<Core, FusedGate::scalar>(context, p);
    default:
      return launch<Core, FusedGate::key>(context, p);
  }
}

}  // namespace

void launch_fused(Context& context, const Params& p, bool hopper) {
  hopper ? launch<TensorCore90>(context, p) : launch<TensorCore80>(context, p);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
