// What the kernels of the backward share, and their launchers; instantiations/ has one source a gate.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include "flashgla/ops/gated_linear_attention/cuda/forward/two_pass.h"
#include "flashgla/ops/gated_linear_attention/cuda/limits.h"
#include "flashgla/ops/gated_linear_attention/cuda/params.h"

namespace flashgla::ops::gated_linear_attention::cuda {

// Between the kernels of the backward by chunks.
struct BackwardWorkspace {
  Prepared prepared;  // with P^T and the scale
  // As Params.states: dh, the gradient of the state after the chunk; without the scale where preparation is plain.
  char* state_gradients;
  float* gate_parts;  // scalar gates: [key tiles, tokens, G]; constant gates: [key tiles + group, chunks, G]
};

// The backward in one kernel.
struct FusedBackward {
  Gradients gradients;
  const float* d_ht;  // [N,G,K,V] or null: zero
  float* dh0;         // or null: not wanted
  float* gate_parts;  // constant gates: [N, G]
};

// The launchers of one tensor core and way to find gates.
template <class Core, GatesAs kGate>
struct BackwardLaunch {
  // K, V <= 64, G = H, states kept; without key gates on Hopper at every fourth chunk, and rows of q, k, v and do as
  // TMA takes them.
  static void one_kernel(const Params& p, const FusedBackward& f, int multiprocessors, cudaStream_t stream);
  static void dq_dk_dg(const Params& p, const BackwardWorkspace& w, const Gradients& d, int multiprocessors,
                       cudaStream_t stream);
  // One gate a token: the rows of gate_parts beyond the key tiles.
  static void constant_gate_pairs(const Params& p, const BackwardWorkspace& w, const Strided& d_o, cudaStream_t stream);
};
// Sums parts [tiles, rows, G] into dg of scalar gates (a row a token) or constant gates, in a fixed order; where the
// number of chunks is given (on the device), not if there are none.
void launch_gate_sums(const Params& p, const float* parts, std::int64_t rows, int tiles, const Strided& dg,
                      cudaStream_t stream, const std::int64_t* chunks = nullptr);

}  // namespace flashgla::ops::gated_linear_attention::cuda
