// Kernels of f32 tiles and their launch; one translation unit of instantiations/ each core.
#pragma once

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/f32_gradients.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/f32_outputs.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/f32_states.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

template <class Kernel, bool kBackwards, bool kGrouped>
__global__ void __launch_bounds__(kGroupThreads, 2)
    split_states_kernel(const __grid_constant__ Params p, const __grid_constant__ SplitPass pass) {
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Kernel::Core::available) pass_split_states<Kernel, kBackwards, kGrouped>(p, pass, shared);
}

template <class Kernel, bool kValueGradient, bool kOnce>
__global__ void __launch_bounds__(kGroupThreads, Kernel::parts == 2 && kOnce ? 3 : 2)
    split_outputs_kernel(const __grid_constant__ Params p, const __grid_constant__ SplitOutputs outputs) {
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Kernel::Core::available) make_outputs<Kernel, kValueGradient, kOnce>(p, outputs, shared);
}

template <class Kernel, bool kGrouped>
__global__ void __launch_bounds__(kGroupThreads, 2)
    split_gradients_kernel(const __grid_constant__ Params p, const __grid_constant__ SplitGradients gradients) {
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Kernel::Core::available) make_split_gradients<Kernel, kGrouped>(p, gradients, shared);
}

template <class Kernel, bool kBackwards>
void launch_split_states(const Params& p, const SplitPass& pass, cudaStream_t stream) {
  const std::int64_t tiles = p.sequences.count * p.heads * tiles_of(p.key_dim) * tiles_of(p.value_dim);
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(pass.segments - pass.ends_only));
  flashgla::cuda::launch("gated_linear_attention states in f32 tiles",
                         kBackwards && p.group > 1 ? split_states_kernel<Kernel, kBackwards, kBackwards>
                                                   : split_states_kernel<Kernel, kBackwards, false>,
                         grid, kGroupThreads, kStatesShared<Kernel::parts>, stream,
                         flashgla::cuda::Begin::after_previous, p, pass);
}

template <class Kernel, bool kValueGradient>
void launch_split_outputs(const Params& p, const SplitOutputs& outputs, cudaStream_t stream) {
  const std::int64_t heads = kValueGradient ? p.heads : p.heads * p.group;
  const dim3 grid(static_cast<unsigned>(p.sequences.most_chunks * heads * tiles_of(p.value_dim)));
  const bool once = p.key_dim <= kTile && (!kValueGradient || p.group == 1);
  flashgla::cuda::launch(
      "gated_linear_attention outputs in f32 tiles",
      once ? split_outputs_kernel<Kernel, kValueGradient, true> : split_outputs_kernel<Kernel, kValueGradient, false>,
      grid, kGroupThreads, OutputsShared<Kernel::parts>::total, stream, flashgla::cuda::Begin::after_previous, p,
      outputs);
}

template <class Kernel>
void launch_split_gradients(const Params& p, const SplitGradients& gradients, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(p.sequences.most_chunks * p.heads * tiles_of(p.key_dim)));
  const char* name = "gated_linear_attention gradients in f32 tiles";
  if (p.group > 1) {
    flashgla::cuda::launch(name, split_gradients_kernel<Kernel, true>, grid, kGroupThreads,
                           GradientsShared<Kernel::parts, true>::total, stream, flashgla::cuda::Begin::after_previous,
                           p, gradients);
  } else {
    flashgla::cuda::launch(name, split_gradients_kernel<Kernel, false>, grid, kGroupThreads,
                           GradientsShared<Kernel::parts, false>::total, stream, flashgla::cuda::Begin::after_previous,
                           p, gradients);
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
