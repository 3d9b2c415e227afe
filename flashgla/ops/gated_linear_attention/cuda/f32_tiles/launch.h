// Launchers of the kernels of f32 tiles, and what they are told beside Params; instantiations/ has one source a type.
#pragma once

#include <cuda_runtime_api.h>

#include "flashgla/ops/gated_linear_attention/cuda/forward/two_pass.h"
#include "flashgla/ops/gated_linear_attention/cuda/limits.h"

namespace flashgla::ops::gated_linear_attention::cuda {

// What a kernel is compiled for: q, k, v, o and their gradients are of type T, __half or float; or, where values are
// gated too, bf16 in one part. Gates are of type T or f32.
template <class TensorCore, class T, int kTheParts>
struct SplitKernel {
  using Core = TensorCore;
  using Element = T;
  static constexpr int parts = kTheParts;
};

// One pass over the chunks of each sequence; segments of time where sequences are few. What is prepared (two_pass.h)
// lies as images of split tiles (f32_tiles/prepared.cuh). Without: K and V are at most 64 and G = H. Where values are
// gated too there are those of the values' side beside them: of do, v, gv and value tiles.
struct SplitPass {
  Strided b;           // v, or backwards do
  const float* start;  // [N,G,K,V] or null: zeros. h0, or dht
  float* end;          // likewise, or null: not wanted. ht, or dh0
  char* images;        // before each chunk h, after it dh
  Prepared prepared;
  Prepared values;                               // with gates over values: instead of b
  float start_factor = 1.0f, end_factor = 1.0f;  // of bf16
  int segments = 1;
  bool ends_only = false;           // of the launch that finds the segments' ends, where there are several
  float* segment_ends = nullptr;    // [segments - 1, tiles of all states, 4096]
  float* segment_decays = nullptr;  // [segments - 1, tiles of all states, 64], factors; gated values: 128
};

// o from v and states, or dv from do and their gradients.
struct SplitOutputs {
  Strided x, out;
  const char* images;
  Prepared prepared;
  const char* later = nullptr;  // with gates over values: v times those behind it in the chunk
};

struct SplitGradients {
  Strided d_o, dq, dk, dg;  // without data: not wanted
  const char *states, *state_gradients;
  float* gate_parts;  // scalar gates: [key tiles, tokens, G]; constant gates: [key tiles, chunks, G]; or null
  Prepared other;     // with gates over values: the other side's, instead of d_o and v
  Prepared own;       // of bf16
};

// Which side's gradients, where values are gated too.
enum class GatedSide { only_keys, keys, values };

// The launchers of one SplitKernel. Of bf16 preparation is that of forward/prepare.cuh, gradients are those of
// value_gates/.
template <class Kernel>
struct SplitLaunch {
  static void prepare(Context& context, const Params& p, const Prepared& images, cudaStream_t stream);
  static void states(const Params& p, SplitPass pass, bool backwards, cudaStream_t stream);
  static void outputs(const Params& p, const SplitOutputs& outputs, bool value_gradient, cudaStream_t stream);
  // p: with gates over values the side, whose query, key and gate gradients are dq, dk and dg.
  static void gradients(const Params& p, const SplitGradients& gradients, GatedSide side, cudaStream_t stream);

  // With gates over values. The values' side is a problem of gates over keys of its own: q is do, k v, g gv, K and V
  // have changed places, the scale is 1.
  static void later(const Params& values, const Prepared& images, cudaStream_t stream);
  // outputs.x: v; images: of h; prepared: of the keys; later: as later() has left it.
  static void gated_outputs(const Params& values, const SplitOutputs& outputs, cudaStream_t stream);
};

}  // namespace flashgla::ops::gated_linear_attention::cuda
