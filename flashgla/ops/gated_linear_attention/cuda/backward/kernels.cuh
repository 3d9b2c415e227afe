// Kernels of the chunked backward and their launch; one source of instantiations/ each gate tile.
#pragma once

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/backward/channels.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/backward/constant_gate.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/backward/keys.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/backward/launch.h"

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

template <class Core, GatesAs kGate>
void BackwardLaunch<Core, kGate>::one_kernel(const Params& p, const FusedBackward& f, cudaStream_t stream) {
  if constexpr (kGate == GatesAs::f32) {
    launch_backward_channels<Core, GatesAs::f32>(p, f, stream);
  } else if constexpr (kGate == GatesAs::bf16) {
    if (p.logit_scale == 0.0f) return launch_backward_channels<Core, GatesAs::bf16>(p, f, stream);
    if constexpr (std::is_same_v<Core, TensorCore90>) launch_backward_channels<Core, GatesAs::logits>(p, f, stream);
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
