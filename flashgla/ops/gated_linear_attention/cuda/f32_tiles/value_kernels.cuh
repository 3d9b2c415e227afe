// Kernels of f32 tiles with gates over values and their launch.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles/kernels.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles/values.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

static __device__ __forceinline__ void begin_beside_previous() {
  flashgla::cuda::wait_for_previous();
  flashgla::cuda::release_next_of_waves();
}

template <class Kernel>
__global__ void __launch_bounds__(kGroupThreads)
    split_later_kernel(const __grid_constant__ Params p, const __grid_constant__ SplitImages images) {
  begin_beside_previous();
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Kernel::Core::available) gate_later<Kernel>(p, images, shared);
}

template <class Kernel, bool kBackwards>
__global__ void __launch_bounds__(kGroupThreads, Kernel::parts == 2 ? 3 : 2)
    gated_states_kernel(const __grid_constant__ Params p, const __grid_constant__ SplitPass pass) {
  begin_beside_previous();
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Kernel::Core::available) pass_gated_states<Kernel, kBackwards>(p, pass, shared);
}

template <class Kernel>
__global__ void __launch_bounds__(kGroupThreads, Kernel::parts == 2 ? 3 : 2)
    gated_outputs_kernel(const __grid_constant__ Params p, const __grid_constant__ SplitOutputs outputs) {
  begin_beside_previous();
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Kernel::Core::available) make_gated_outputs<Kernel>(p, outputs, shared);
}

template <class Kernel, bool kGrouped, GatedSide kSide>
__global__ void __launch_bounds__(kGroupThreads, 2)
    gated_gradients_kernel(const __grid_constant__ Params p, const __grid_constant__ SplitGradients gradients) {
  begin_beside_previous();
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Kernel::Core::available) make_split_gradients<Kernel, kGrouped, kSide>(p, gradients, shared);
}

template <class Kernel, class Function, class Work>
void launch_gated(const char* name, Function* kernel, dim3 grid, int shared, cudaStream_t stream, const Params& p,
                  const Work& work) {
  flashgla::cuda::launch(name, kernel, grid, kGroupThreads, shared, stream, kNext<typename Kernel::Core>, p, work);
}

template <class Kernel>
void launch_split_later(const Params& values, const SplitImages& images, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(values.sequences.most_chunks * values.heads * tiles_of(values.key_dim)));
  launch_gated<Kernel>("gated_linear_attention gated values of f32 tiles", split_later_kernel<Kernel>, grid,
                       4 * kTile * 4, stream, values, images);
}

template <class Kernel, bool kBackwards>
void launch_gated_states(const Params& p, const SplitPass& pass, cudaStream_t stream) {
  const std::int64_t tiles = p.sequences.count * p.heads * tiles_of(p.key_dim) * tiles_of(p.value_dim);
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(pass.segments - pass.ends_only));
  launch_gated<Kernel>("gated_linear_attention states in f32 tiles", gated_states_kernel<Kernel, kBackwards>, grid,
                       kGatedStatesShared<Kernel::parts>, stream, p, pass);
}

template <class Kernel>
void launch_gated_outputs(const Params& values, const SplitOutputs& outputs, cudaStream_t stream) {
  const std::int64_t heads = values.heads * values.group;
  const dim3 grid(static_cast<unsigned>(values.sequences.most_chunks * heads * tiles_of(values.key_dim)));
  launch_gated<Kernel>("gated_linear_attention outputs in f32 tiles", gated_outputs_kernel<Kernel>, grid,
                       kGatedOutputsShared<Kernel::parts>, stream, values, outputs);
}

template <class Kernel, bool kOverValues>
void launch_gated_gradients(const Params& side, const SplitGradients& gradients, cudaStream_t stream) {
  constexpr GatedSide kSide = kOverValues ? GatedSide::values : GatedSide::keys;
  const dim3 grid(static_cast<unsigned>(side.sequences.most_chunks * side.heads * tiles_of(side.key_dim)));
  const char* name = "gated_linear_attention gradients in f32 tiles";
  if (side.group > 1) {
    launch_gated<Kernel>(name, gated_gradients_kernel<Kernel, true, kSide>, grid,
                         GradientsShared<Kernel::parts, true>::total, stream, side, gradients);
  } else {
    launch_gated<Kernel>(name, gated_gradients_kernel<Kernel, false, kSide>, grid,
                         GradientsShared<Kernel::parts, false>::total, stream, side, gradients);
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
