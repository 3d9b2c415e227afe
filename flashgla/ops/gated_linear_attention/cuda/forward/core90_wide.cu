// Launcher of the one-pass forward of wide heads: kernels for Hopper alone.
#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/forward/wide.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/launch.h"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace {

template <int KB, int groups, int peers = 1>
void launch(cudaStream_t stream, const Params& p) {
  using Plan = WidePlan<KB, groups, peers>;
  static_assert(Plan::bytes <= 227 * 1024);
  const bool f32_gates = p.gate == GateKind::key && p.gate_dtype == DType::f32;
  const WideMaps maps{row_map_of(p, p.q, p.heads * p.group, p.key_dim), row_map_of(p, p.k, p.heads, p.key_dim),
                      p.gate == GateKind::key && !f32_gates ? row_map_of(p, p.g, p.heads, p.key_dim) : RowMap{},
                      row_map_of(p, p.v, p.heads, p.value_dim), row_map_of(p, p.o, p.heads * p.group, p.value_dim)};
  const std::int64_t slices = (p.value_dim + 64 * groups - 1) / (64 * groups);
  with_gates_as<TensorCore90>(p, [&]<GatesAs gates>() {
    flashgla::cuda::launch("gated_linear_attention wide forward",
                           wide_forward_kernel<TensorCore90, KB, groups, peers, gates>,
                           {dim3(static_cast<unsigned>(p.sequences.count * p.heads * p.group * slices)), peers},
                           Plan::threads, Plan::bytes, stream, kNext<TensorCore90>, p, maps);
  });
}

}  // namespace

void launch_wide_forward(void* stream, const Params& p) {
  const auto queue = static_cast<cudaStream_t>(stream);
  const bool wide_keys = p.key_dim > kTile, wide_values = p.value_dim > kTile;
  const bool in_pairs = (p.value_dim + 127) / 128 % 2 == 0;  // slices of 128 value channels, which gate for each other
  if (wide_keys && wide_values) {
    in_pairs ? launch<2, 2, 2>(queue, p) : launch<2, 2>(queue, p);
  } else if (wide_keys) {
    launch<2, 1>(queue, p);
  } else {
    wide_values ? launch<1, 2>(queue, p) : launch<1, 1>(queue, p);
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
