// What the kernels of this folder are given, and the launchers of those for Hopper (core90_by_role.cu).
#pragma once

#include <cuda_runtime_api.h>

#include "flashgla/ops/gated_linear_attention/cuda/params.h"

namespace flashgla::ops::gated_linear_attention::cuda::shared_keys {

struct Walk {
  Strided keys, values;  // k and v; backwards q and d_o
  const float* start;    // f32 [N,G,K,V], or null: zeros
  float* end;            // likewise; null: not wanted
  char* images;          // bf16, as Params::states; null: not wanted
};

struct ChunkGradients {
  Strided d_o, dv, dg;          // dv, dg without data: not wanted
  const char* state_gradients;  // at the end of each chunk, as Params::states
  float *dq, *dk;               // [splits, tokens, K]
  std::int64_t tokens;
};

// A chunk's blocks, the heads split over them.
inline dim3 blocks_of(const Params& p, int splits) {
  return {static_cast<unsigned>(p.sequences.most_chunks), static_cast<unsigned>(splits)};
}

constexpr const char* kName = "gated_linear_attention shared keys";

// Calls run<kTiles>() with a head's key tiles.
template <class Run>
void with_tiles(const Params& p, const Run& run) {
  p.key_dim == kTile ? run.template operator()<1>() : run.template operator()<2>();
}

// Writes sums of gates (gate_sums.cuh), which the others read.
void launch_gate_sums(const Params& p, float* gate_sums, cudaStream_t stream);
// States; these and outputs; gradients of states, backwards.
enum class WalkFor { states, outputs, gradients };
void launch_walk_by_role(const Params& p, const Walk& walk, const float* gate_sums, WalkFor what, cudaStream_t stream);
// splits: over how many blocks the heads of a chunk are split.
void launch_gradients_by_role(const Params& p, const ChunkGradients& d, const float* gate_sums, int splits,
                              cudaStream_t stream);

}  // namespace flashgla::ops::gated_linear_attention::cuda::shared_keys
