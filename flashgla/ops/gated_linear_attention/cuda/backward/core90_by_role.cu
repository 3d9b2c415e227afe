// Launcher of the one-kernel backward without gates or with one a token on Hopper.
#include <algorithm>

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/backward/by_role.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/backward/launch.h"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace {

constexpr const char* kName = "gated_linear_attention fused backward";

template <class Core, bool kGated>
__global__ void __launch_bounds__(ByRole<kGated>::threads, 1)
    backward_by_role_kernel(const __grid_constant__ Params p, const __grid_constant__ FusedBackward f,
                            const __grid_constant__ RoleMaps maps, bool in_pairs) {
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Core::available) backward_by_role<Core, kGated>(p, f, maps, in_pairs, shared);
}

}  // namespace

void launch_backward_by_role(const Params& p, const FusedBackward& f, int multiprocessors, cudaStream_t stream) {
  const auto units = static_cast<unsigned>(p.sequences.count * p.heads);
  const auto brought = [&](const Strided& x, int channels) { return row_map_of(p, x, p.heads, channels); };
  const auto taken = [&](const Strided& x, int channels) {
    return x.data == nullptr ? RowMap{} : row_map_of(p, x, p.heads, channels, 16);
  };
  const Gradients& d = f.gradients;
  const RoleMaps maps{.q = brought(p.q, p.key_dim),
                      .k = brought(p.k, p.key_dim),
                      .v = brought(p.v, p.value_dim),
                      .d_o = brought(d.d_o, p.value_dim),
                      .rows = {d.dq, d.dv, d.dk},
                      .out = {taken(d.dq, p.key_dim), taken(d.dv, p.value_dim), taken(d.dk, p.key_dim)},
                      .units = units};
  const dim3 grid(std::min(units, static_cast<unsigned>(multiprocessors)));
  const bool in_pairs = p.heads % 2 == 0 && grid.x % 2 == 0;
  const auto queue = [&]<bool kGated>(std::bool_constant<kGated>) {
    flashgla::cuda::launch(kName, backward_by_role_kernel<TensorCore90, kGated>,
                           flashgla::cuda::Grid{grid, in_pairs ? 2 : 1}, ByRole<kGated>::threads, ByRole<kGated>::total,
                           stream, kNext<TensorCore90>, p, f, maps, in_pairs);
  };
  p.gate == GateKind::none ? queue(std::false_type()) : queue(std::true_type());
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
