// Launchers of this folder's kernels for Hopper.
#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/shared_keys/gradients_by_role.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/shared_keys/walk_by_role.cuh"

namespace flashgla::ops::gated_linear_attention::cuda::shared_keys {

namespace {

using flashgla::cuda::Begin;
using flashgla::cuda::launch;

RowMap keys_of(const Params& p, const Strided& x) { return row_map_of(p, x, p.heads, p.key_dim); }
RowMap values_of(const Params& p, const Strided& x) { return row_map_of(p, x, p.heads, p.value_dim); }

}  // namespace

void launch_gate_sums(const Params& p, float* gate_sums, cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>(p.sequences.most_chunks),
                    static_cast<unsigned>((p.heads + kGateHeads - 1) / kGateHeads));
  launch(kName, gate_sums_kernel, blocks, kGateThreads, 0, stream, Begin::beside_previous, p, gate_sums);
}

void launch_walk_by_role(const Params& p, const Walk& walk, const float* gate_sums, WalkFor what, cudaStream_t stream) {
  const bool outputs = what == WalkFor::outputs;
  const WalkMaps maps{outputs ? keys_of(p, p.q) : RowMap{}, keys_of(p, walk.keys), values_of(p, walk.values)};
  with_tiles(p, [&]<int kTiles>() {
    const auto queue = [&]<bool kOutputs, bool kBackwards>() {
      using Layout = WalkByRole<kTiles, kOutputs>;
      const dim3 blocks(static_cast<unsigned>((p.heads + Layout::heads - 1) / Layout::heads),
                        static_cast<unsigned>(p.sequences.count));
      launch(kName, walk_by_role_kernel<TensorCore90, kTiles, kOutputs, kBackwards>, blocks, Layout::threads,
             Layout::total, stream, Begin::beside_previous, p, walk, maps, gate_sums);
    };
    if (outputs) return queue.template operator()<true, false>();
    what == WalkFor::states ? queue.template operator()<false, false>() : queue.template operator()<false, true>();
  });
}

void launch_gradients_by_role(const Params& p, const ChunkGradients& d, const float* gate_sums, int splits,
                              cudaStream_t stream) {
  const GradientsMaps maps{keys_of(p, p.q), keys_of(p, p.k), values_of(p, p.v), values_of(p, d.d_o)};
  with_tiles(p, [&]<int kTiles>() {
    using Layout = GradientsByRole<kTiles>;
    launch(kName, gradients_by_role_kernel<TensorCore90, kTiles>, blocks_of(p, splits), Layout::threads, Layout::total,
           stream, Begin::beside_previous, p, d, maps, gate_sums, p.heads / splits);
  });
}

}  // namespace flashgla::ops::gated_linear_attention::cuda::shared_keys
