// Kernels of f32 tiles, those of value_gates/ in their place for bf16, and their launch.
#pragma once

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles/gradients.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles/outputs.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles/prepared.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles/states.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/value_gates/value_gates.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

// Of kernels beside gates over values.
static __device__ __forceinline__ void begin_beside_previous() {
  flashgla::cuda::wait_for_previous();
  flashgla::cuda::release_next_of_waves();
}

template <class Kernel>
__global__ void __launch_bounds__(kGroupThreads, 2)
    split_prepare_kernel(const __grid_constant__ Params p, const __grid_constant__ Prepared images) {
  flashgla::cuda::release_next_of_waves();  // to kernels that begin beside it, with gates over values
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Kernel::Core::available) prepare_split<Kernel>(p, images, shared);
}

// What states and outputs are made of: rows that they gate themselves, what is prepared of the keys, or of both sides.
enum class Operands { own, prepared, gated };

template <class Kernel, Operands kOf>
constexpr int kStatesBlocks = kOf == Operands::own || Kernel::parts == 3 ? 2
                              : Kernel::parts == 2                       ? 3
                                                                         : 4;

template <class Kernel, Operands kOf, bool kBackwards>
__global__ void __launch_bounds__(kGroupThreads, kStatesBlocks<Kernel, kOf>)
    split_states_kernel(const __grid_constant__ Params p, const __grid_constant__ SplitPass pass) {
  if constexpr (kOf == Operands::gated) begin_beside_previous();
  extern __shared__ __align__(1024) char shared[];
  if constexpr (!Kernel::Core::available) {
  } else if constexpr (kOf == Operands::gated) {
    pass_gated_states<Kernel, kBackwards>(p, pass, shared);
  } else {
    pass_split_states<Kernel, kBackwards, kOf == Operands::prepared>(p, pass, shared);
  }
}

template <class Kernel, Operands kOf, bool kValueGradient>
__global__ void __launch_bounds__(kGroupThreads, Kernel::parts < 3 ? 3 : 2)
    split_outputs_kernel(const __grid_constant__ Params p, const __grid_constant__ SplitOutputs outputs) {
  if constexpr (kOf == Operands::gated) begin_beside_previous();
  extern __shared__ __align__(1024) char shared[];
  if constexpr (!Kernel::Core::available) {
  } else if constexpr (kOf == Operands::own) {
    make_own_outputs<Kernel, kValueGradient>(p, outputs, shared);
  } else if constexpr (kOf == Operands::prepared) {
    make_prepared_outputs<Kernel, kValueGradient>(p, outputs, shared);
  } else {
    make_gated_outputs<Kernel>(p, outputs, shared);
  }
}

template <class Kernel, bool kGrouped, GatedSide kSide>
__global__ void __launch_bounds__(kGroupThreads, 2)
    split_gradients_kernel(const __grid_constant__ Params p, const __grid_constant__ SplitGradients gradients) {
  if constexpr (kSide != GatedSide::only_keys) begin_beside_previous();
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Kernel::Core::available) make_split_gradients<Kernel, kGrouped, kSide>(p, gradients, shared);
}

// Three blocks a multiprocessor; where there is mma.sync alone, shared memory has room for no more than two.
template <class Core, bool kOverValues>
__global__ void __launch_bounds__(kGroupThreads, std::is_same_v<Core, TensorCore80> ? 2 : 3)
    make_side_kernel(const __grid_constant__ Params p, const __grid_constant__ SplitGradients gradients) {
  begin_beside_previous();
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Core::available) make_side<Core, kOverValues>(p, gradients, shared);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kLaterBlocks = 6;  // a multiprocessor, of bf16; seven would spill
#else
constexpr int kLaterBlocks = 7;
#endif
template <class Kernel>
__global__ void __launch_bounds__(kGroupThreads, Kernel::parts == 1 ? kLaterBlocks : 0)
    split_later_kernel(const __grid_constant__ Params p, const __grid_constant__ Prepared images) {
  begin_beside_previous();
  extern __shared__ __align__(1024) char shared[];
  if constexpr (Kernel::Core::available) gate_later<Kernel>(p, images, shared);
}

// ---- launches ----

// A kernel of `blocks` x `segments`.
template <class Work>
void launch_split(const char* name, void (*kernel)(Params, Work), std::int64_t blocks, int segments, int shared,
                  cudaStream_t stream, flashgla::cuda::Begin begin, const Params& p, const Work& work) {
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(segments));
  flashgla::cuda::launch(name, kernel, grid, kGroupThreads, shared, stream, begin, p, work);
}

constexpr const char* kPreparation = "gated_linear_attention preparation of f32 tiles";
constexpr const char* kGatedValues = "gated_linear_attention gated values of f32 tiles";
constexpr const char* kStates = "gated_linear_attention states in f32 tiles";
constexpr const char* kOutputs = "gated_linear_attention outputs in f32 tiles";
constexpr const char* kGradients = "gated_linear_attention gradients in f32 tiles";
constexpr auto kAfter = flashgla::cuda::Begin::after_previous;

template <class Kernel>
void SplitLaunch<Kernel>::prepare(Context& context, const Params& p, const Prepared& images, cudaStream_t stream) {
  if constexpr (Kernel::parts == 1) {
    launch_forward_prepare<typename Kernel::Core>(context, p, images);
  } else {
    launch_split(kPreparation, split_prepare_kernel<Kernel>, p.sequences.most_chunks * p.heads * p.group, 1,
                 PrepareShared<Kernel::parts>::total, stream, kAfter, p, images);
  }
}

template <class Kernel>
void SplitLaunch<Kernel>::states(const Params& p, SplitPass pass, bool backwards, cudaStream_t stream) {
  const std::int64_t tiles = p.sequences.count * p.heads * tiles_of(p.key_dim) * tiles_of(p.value_dim);
  const auto run = [&]<Operands kOf>(int shared, flashgla::cuda::Begin begin) {
    const auto kernel = backwards ? split_states_kernel<Kernel, kOf, true> : split_states_kernel<Kernel, kOf, false>;
    if (pass.segments > 1) {
      pass.ends_only = true;
      launch_split(kStates, kernel, tiles, pass.segments - 1, shared, stream, begin, p, pass);
      pass.ends_only = false;
    }
    launch_split(kStates, kernel, tiles, pass.segments, shared, stream, begin, p, pass);
  };
  if (pass.values.k != nullptr) {
    run.template operator()<Operands::gated>(GatedStatesShared<Kernel::parts>::total, kNext<typename Kernel::Core>);
  } else if constexpr (Kernel::parts > 1) {
    pass.prepared.q != nullptr ? run.template operator()<Operands::prepared>(kStatesShared<Kernel::parts, true>, kAfter)
                               : run.template operator()<Operands::own>(kStatesShared<Kernel::parts, false>, kAfter);
  }
}

template <class Kernel>
void SplitLaunch<Kernel>::outputs(const Params& p, const SplitOutputs& outputs, bool value_gradient,
                                  cudaStream_t stream) {
  if constexpr (Kernel::parts > 1) {
    const int heads = value_gradient ? p.heads : p.heads * p.group;
    const auto run = [&](auto* of_gradients, auto* of_values, int shared) {
      launch_split(kOutputs, value_gradient ? of_gradients : of_values,
                   p.sequences.most_chunks * heads * tiles_of(p.value_dim), 1, shared, stream, kAfter, p, outputs);
    };
    outputs.prepared.q != nullptr
        ? run(split_outputs_kernel<Kernel, Operands::prepared, true>,
              split_outputs_kernel<Kernel, Operands::prepared, false>, kPreparedOutputsShared<Kernel::parts>)
        : run(split_outputs_kernel<Kernel, Operands::own, true>, split_outputs_kernel<Kernel, Operands::own, false>,
              OutputsShared<Kernel::parts>::total);
  }
}

template <class Kernel>
void SplitLaunch<Kernel>::gradients(const Params& p, const SplitGradients& gradients, GatedSide side,
                                    cudaStream_t stream) {
  const std::int64_t blocks = p.sequences.most_chunks * p.heads * tiles_of(p.key_dim);
  constexpr auto kBeside = kNext<typename Kernel::Core>;
  if constexpr (Kernel::parts == 1) {
    const auto kernel = side == GatedSide::values ? make_side_kernel<typename Kernel::Core, true>
                                                  : make_side_kernel<typename Kernel::Core, false>;
    launch_split(kGradients, kernel, blocks, 1, SideShared::total, stream, kBeside, p, gradients);
  } else {
    const bool grouped = p.group > 1;
    const auto run = [&]<GatedSide kSide>() {
      launch_split(kGradients,
                   grouped ? split_gradients_kernel<Kernel, true, kSide> : split_gradients_kernel<Kernel, false, kSide>,
                   blocks, 1, split_gradients_shared(Kernel::parts, grouped), stream,
                   kSide == GatedSide::only_keys ? kAfter : kBeside, p, gradients);
    };
    side == GatedSide::only_keys ? run.template operator()<GatedSide::only_keys>()
    : side == GatedSide::keys    ? run.template operator()<GatedSide::keys>()
                                 : run.template operator()<GatedSide::values>();
  }
}

template <class Kernel>
void SplitLaunch<Kernel>::later(const Params& values, const Prepared& images, cudaStream_t stream) {
  launch_split(kGatedValues, split_later_kernel<Kernel>,
               values.sequences.most_chunks * values.heads * tiles_of(values.key_dim), 1, kGateLaterShared, stream,
               kNext<typename Kernel::Core>, values, images);
}

template <class Kernel>
void SplitLaunch<Kernel>::gated_outputs(const Params& values, const SplitOutputs& outputs, cudaStream_t stream) {
  launch_split(kOutputs, split_outputs_kernel<Kernel, Operands::gated, false>,
               values.sequences.most_chunks * values.heads * values.group * tiles_of(values.key_dim), 1,
               GatedOutputsShared<Kernel::parts>::total, stream, kNext<typename Kernel::Core>, values, outputs);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
