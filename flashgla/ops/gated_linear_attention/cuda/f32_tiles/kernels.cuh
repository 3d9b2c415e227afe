// Kernels of f32 tiles and their launch.
#pragma once

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles/gradients.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles/outputs.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles/prepared.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles/states.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

template <class Kernel>
__global__ void __launch_bounds__(kGroupThreads, 2)
    split_prepare_kernel(const __grid_constant__ Params p, const __grid_constant__ SplitImages images) {
  flashgla::cuda::release_next_of_waves();  // to kernels that begin beside it: those of f32_tiles/values.cuh
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Kernel::Core::available) prepare_split<Kernel>(p, images, shared);
}

template <class Kernel, bool kBackwards, bool kPrepared>
__global__ void __launch_bounds__(kGroupThreads, kPrepared&& Kernel::parts == 2 ? 3 : 2)
    split_states_kernel(const __grid_constant__ Params p, const __grid_constant__ SplitPass pass) {
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Kernel::Core::available) pass_split_states<Kernel, kBackwards, kPrepared>(p, pass, shared);
}

template <class Kernel, bool kValueGradient>
__global__ void __launch_bounds__(kGroupThreads, Kernel::parts == 2 ? 3 : 2)
    split_outputs_kernel(const __grid_constant__ Params p, const __grid_constant__ SplitOutputs outputs) {
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Kernel::Core::available) make_outputs<Kernel, kValueGradient>(p, outputs, shared);
}

template <class Kernel, bool kValueGradient>
__global__ void __launch_bounds__(kGroupThreads, Kernel::parts == 2 ? 3 : 2)
    prepared_outputs_kernel(const __grid_constant__ Params p, const __grid_constant__ SplitOutputs outputs) {
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Kernel::Core::available) make_prepared_outputs<Kernel, kValueGradient>(p, outputs, shared);
}

template <class Kernel, bool kGrouped>
__global__ void __launch_bounds__(kGroupThreads, 2)
    split_gradients_kernel(const __grid_constant__ Params p, const __grid_constant__ SplitGradients gradients) {
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Kernel::Core::available)
    make_split_gradients<Kernel, kGrouped, GatedSide::only_keys>(p, gradients, shared);
}

template <class Function, class Work>
void launch_split(const char* name, Function* kernel, dim3 grid, int shared, cudaStream_t stream, const Params& p,
                  const Work& work) {
  flashgla::cuda::launch(name, kernel, grid, kGroupThreads, shared, stream, flashgla::cuda::Begin::after_previous, p,
                         work);
}

template <class Kernel>
void launch_split_prepare(const Params& p, const SplitImages& images, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(p.sequences.most_chunks * p.heads * p.group));
  launch_split("gated_linear_attention preparation of f32 tiles", split_prepare_kernel<Kernel>, grid,
               PrepareShared<Kernel::parts>::total, stream, p, images);
}

template <class Kernel, bool kBackwards>
void launch_split_states(const Params& p, const SplitPass& pass, cudaStream_t stream) {
  const std::int64_t tiles = p.sequences.count * p.heads * tiles_of(p.key_dim) * tiles_of(p.value_dim);
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(pass.segments - pass.ends_only));
  const char* name = "gated_linear_attention states in f32 tiles";
  if (pass.prepared.q != nullptr) {
    launch_split(name, split_states_kernel<Kernel, kBackwards, true>, grid, kStatesShared<Kernel::parts, true>, stream,
                 p, pass);
  } else {
    launch_split(name, split_states_kernel<Kernel, kBackwards, false>, grid, kStatesShared<Kernel::parts, false>,
                 stream, p, pass);
  }
}

template <class Kernel, bool kValueGradient>
void launch_split_outputs(const Params& p, const SplitOutputs& outputs, cudaStream_t stream) {
  const std::int64_t heads = kValueGradient ? p.heads : p.heads * p.group;
  const dim3 grid(static_cast<unsigned>(p.sequences.most_chunks * heads * tiles_of(p.value_dim)));
  const char* name = "gated_linear_attention outputs in f32 tiles";
  if (outputs.prepared.q != nullptr) {
    launch_split(name, prepared_outputs_kernel<Kernel, kValueGradient>, grid, kPreparedOutputsShared<Kernel::parts>,
                 stream, p, outputs);
  } else {
    launch_split(name, split_outputs_kernel<Kernel, kValueGradient>, grid, OutputsShared<Kernel::parts>::total, stream,
                 p, outputs);
  }
}

template <class Kernel>
void launch_split_gradients(const Params& p, const SplitGradients& gradients, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(p.sequences.most_chunks * p.heads * tiles_of(p.key_dim)));
  const char* name = "gated_linear_attention gradients in f32 tiles";
  if (p.group > 1) {
    launch_split(name, split_gradients_kernel<Kernel, true>, grid, GradientsShared<Kernel::parts, true>::total, stream,
                 p, gradients);
  } else {
    launch_split(name, split_gradients_kernel<Kernel, false>, grid, GradientsShared<Kernel::parts, false>::total,
                 stream, p, gradients);
  }
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
