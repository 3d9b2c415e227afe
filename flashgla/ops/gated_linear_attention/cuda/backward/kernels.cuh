// Kernels of the backward and their launch; one source of instantiations/ each way that gates come.
#pragma once

#include <algorithm>

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/backward/by_role.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/backward/channels.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/backward/constant_gate.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/backward/keys.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/backward/launch.h"
#include "flashgla/ops/gated_linear_attention/cuda/backward/rows.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

template <class Core, GatesAs kGate, bool kGrouped>
__global__ void __launch_bounds__(PairShared<Core>::threads, 1)
    make_dq_dk_dg_kernel(const __grid_constant__ Params p, const __grid_constant__ BackwardWorkspace w,
                         const __grid_constant__ Gradients d, const __grid_constant__ RowMaps maps, unsigned items) {
  if (ends_idle(p.sequences)) return;
  if (!PairShared<Core>::in_bulk || p.sequences.cu_seqlens != nullptr) flashgla::cuda::wait_for_previous();
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Core::available) make_dq_dk_dg<Core, kGate, kGrouped>(p, w, d, maps, items, shared);
}

template <class Core, GatesAs kGates>
__global__ void __launch_bounds__(kFusedThreads, 2)
    backward_channels_kernel(const __grid_constant__ Params p, const __grid_constant__ FusedBackward f) {
  flashgla::cuda::wait_for_previous();
  release_other_way(p.sequences);
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Core::available) backward_channels<Core, kGates>(p, f, shared);
}

template <class Core, GatesAs kGates>
void launch_backward_channels(const Params& p, const FusedBackward& f, cudaStream_t stream) {
  static_assert(ChannelsShared::total <= kFusedSharedBytes);
  flashgla::cuda::launch("gated_linear_attention backward of key gates", backward_channels_kernel<Core, kGates>,
                         dim3(static_cast<unsigned>(p.sequences.count * p.heads)), kFusedThreads, ChannelsShared::total,
                         stream, kNext<Core>, p, f);
}

constexpr const char* kWithoutKeyGates = "gated_linear_attention fused backward";

template <bool kGated>
__global__ void __launch_bounds__(kFusedThreads, 2)
    backward_rows_kernel(const __grid_constant__ Params p, const __grid_constant__ FusedBackward f) {
  extern __shared__ __align__(1024) char shared[];
  backward_rows<kGated>(p, f, shared);
}

template <bool kGated>
void launch_backward_rows(const Params& p, const FusedBackward& f, cudaStream_t stream) {
  static_assert(RowsShared::total <= kFusedSharedBytes);
  flashgla::cuda::launch(kWithoutKeyGates, backward_rows_kernel<kGated>,
                         dim3(static_cast<unsigned>(p.sequences.count * p.heads)), kFusedThreads, RowsShared::total,
                         stream, flashgla::cuda::Begin::after_previous, p, f);
}

template <class Core, bool kGated>
__global__ void __launch_bounds__(ByRole<kGated>::threads, 1)
    backward_by_role_kernel(const __grid_constant__ Params p, const __grid_constant__ FusedBackward f,
                            const __grid_constant__ RoleMaps maps, bool in_pairs) {
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Core::available) backward_by_role<Core, kGated>(p, f, maps, in_pairs, shared);
}

template <class Core, bool kGated>
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
  flashgla::cuda::launch(kWithoutKeyGates, backward_by_role_kernel<Core, kGated>,
                         flashgla::cuda::Grid{grid, in_pairs ? 2 : 1}, ByRole<kGated>::threads, ByRole<kGated>::total,
                         stream, kNext<Core>, p, f, maps, in_pairs);
}

template <class Core, GatesAs kGate>
void BackwardLaunch<Core, kGate>::one_kernel(const Params& p, const FusedBackward& f, int multiprocessors,
                                             cudaStream_t stream) {
  constexpr bool kHopper = std::is_same_v<Core, TensorCore90>, kGated = kGate == GatesAs::tokens;
  if constexpr (kGate == GatesAs::f32) {
    launch_backward_channels<Core, GatesAs::f32>(p, f, stream);
  } else if constexpr (kGate == GatesAs::bf16) {
    if (p.logit_scale == 0.0f) return launch_backward_channels<Core, GatesAs::bf16>(p, f, stream);
    if constexpr (kHopper) launch_backward_channels<Core, GatesAs::logits>(p, f, stream);
  } else if constexpr (kHopper) {
    launch_backward_by_role<Core, kGated>(p, f, multiprocessors, stream);
  } else {
    launch_backward_rows<kGated>(p, f, stream);
  }
}

template <class Core, GatesAs kGate>
void BackwardLaunch<Core, kGate>::dq_dk_dg(const Params& p, const BackwardWorkspace& w, const Gradients& d,
                                           int multiprocessors, cudaStream_t stream) {
  using Layout = PairShared<Core>;
  static_assert(Layout::total <= (Layout::in_bulk ? 227 : 99) * 1024);
  RowMaps maps{};
  if (Layout::in_bulk) {
    maps.v = row_map_of(p, p.v, p.heads, p.value_dim);
    maps.d_o = row_map_of(p, d.d_o, p.heads * p.group, p.value_dim);
    if (w.prepared.plain) {
      maps.q = q_map(p);
      maps.k = k_map(p);
    }
  }
  const auto items = static_cast<unsigned>(most_pairs(p.sequences) * p.heads * tiles_of(p.key_dim)),
             places = static_cast<unsigned>(multiprocessors);
  const dim3 grid(Layout::in_bulk && places < items ? places : items);
  const auto kernel = p.group > 1 ? make_dq_dk_dg_kernel<Core, kGate, true> : make_dq_dk_dg_kernel<Core, kGate, false>;
  flashgla::cuda::launch("gated_linear_attention dq, dk, dg", kernel, grid, Layout::threads, Layout::total, stream,
                         kNext<Core>, p, w, d, maps, items);
}

template <class Core, GatesAs kGate>
void BackwardLaunch<Core, kGate>::constant_gate_pairs(const Params& p, const BackwardWorkspace& w, const Strided& d_o,
                                                      cudaStream_t stream) {
  if constexpr (kGate == GatesAs::tokens) {
    const dim3 grid(static_cast<unsigned>(p.sequences.most_chunks), static_cast<unsigned>(p.heads * p.group));
    flashgla::cuda::launch("gated_linear_attention constant gate", constant_gate_pairs_kernel<Core>, grid,
                           kGroupThreads, kPairsShared, stream, kNext<Core>, p, w, d_o);
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
