// Launcher of what a constant gate's gradient has from inside the chunks.
#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/backward/constant_gate.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

template <class Core>
void launch_constant_gate_pairs(const Params& p, const BackwardWorkspace& w, const Strided& d_o, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(p.sequences.most_chunks), static_cast<unsigned>(p.heads * p.group));
  flashgla::cuda::launch("gated_linear_attention constant gate", constant_gate_pairs_kernel<Core>, grid, kGroupThreads,
                         kPairsShared, stream, kNext<Core>, p, w, d_o);
}

template void launch_constant_gate_pairs<TensorCore80>(const Params&, const BackwardWorkspace&, const Strided&,
                                                       cudaStream_t);
template void launch_constant_gate_pairs<TensorCore90>(const Params&, const BackwardWorkspace&, const Strided&,
                                                       cudaStream_t);

}  // namespace flashgla::ops::gated_linear_attention::cuda
