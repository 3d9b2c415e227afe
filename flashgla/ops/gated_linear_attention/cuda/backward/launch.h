// What the kernels of the chunked backward share, and their launchers; instantiations/ has one source a core and gate.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <algorithm>

#include "flashgla/ops/gated_linear_attention/cuda/params.h"
#include "flashgla/ops/gated_linear_attention/implementations.h"

namespace flashgla::ops::gated_linear_attention::cuda {

struct TensorCore80;  // mma.sync
struct TensorCore90;  // wgmma

constexpr int kTile = 64;
constexpr std::int64_t kImageBytes = kTile * kTile * 2;
__host__ __device__ inline int tiles_of(int channels) { return (channels + kTile - 1) / kTile; }

// How a kernel finds the gates of its 64 tokens x 64 channels.
enum class GateTile { none, token, narrow, wide };  // no gate; one f32 a token; a tile of bf16; 64 rows of 64 f32

// Between the kernels. Images: 64x64 tiles of bf16 as they lie in shared memory.
struct BackwardWorkspace {
  char* gated_q;          // images [chunks, H, key tiles]
  char* gated_k;          // images [chunks, G, key tiles]
  char* scores;           // images [chunks, H]: p transposed, [j][i]
  char* state_gradients;  // images [chunks, G, key tiles, value tiles]: dh^ (dh in steep tiles), [k][v]
  float* decay;           // [chunks, G, 64 key tiles]: B
  int* steep;             // [chunks, G, key tiles]
  float* gate_parts;      // scalar gates: [key tiles, tokens, G]; constant gates: [key tiles + group, chunks, G]
  float* segment_ends;    // see StatePass
  float* segment_decays;
};

struct Gradients {
  Strided d_o, dq, dk, dv, dg;  // without data: not wanted
};

Gradients gradients_of(const Problem& problem, const OutputGradients& d_out, const InputGradients& d_in);

// One pass over the chunks of each sequence. Where sequences and tiles are too few to fill the device, each sequence is
// cut into segments: a first launch (ends_only) finds what each adds to the state and how it decays it, a second starts
// every segment from the truth.
struct StatePass {
  const char* a_images;   // gated_q (backwards) or gated_k (forwards)
  Strided b;              // do, or v
  const float* start;     // [N,G,K,V] or null: zeros. dht, or h0
  float* end;             // likewise, or null: not wanted. dh0
  __nv_bfloat16* states;  // forwards: [chunks,G,K,V]; backwards the images go to the workspace
  int segments = 1;
  bool ends_only = false;           // of all segments but the last walked; nothing else is written
  float* segment_ends = nullptr;    // [segments - 1, tiles of all states, 4096]
  float* segment_decays = nullptr;  // [segments - 1, tiles of all states, 64], base 2
};

// Two thread groups a block share the gated tile, when blocks enough for the device remain; too few are multiplied by
// cutting time into segments.
struct StatePlan {
  int groups, segments;
  std::int64_t tiles;  // of all states

  StatePlan(const Params& p, int multiprocessors)
      : tiles(p.sequences.count * p.heads * tiles_of(p.key_dim) * tiles_of(p.value_dim)) {
    groups = tiles_of(p.value_dim) > 1 && tiles >= 4 * multiprocessors ? 2 : 1;
    const std::int64_t room = 4 * multiprocessors / tiles, chunks = p.sequences.most_chunks / p.sequences.count;
    segments = static_cast<int>(std::clamp<std::int64_t>(std::min(room, chunks / 8), 1, 16));
  }
};

// The backward in one kernel. Shared memory a block needs at most; devices with less go by chunks.
constexpr int kFusedSharedBytes = 112 * 1024;
struct FusedBackward {
  Gradients gradients;
  const float* d_ht;  // [N,G,K,V] or null: zero
  float* dh0;         // or null: not wanted
  float* gate_parts;  // constant gates: [N, G]
};

// K, V <= 64, G = H, states kept, ht given where dht is.
template <class Core, GateTile kGate>
void launch_backward_fused(const Params& p, const FusedBackward& f, cudaStream_t stream);
template <class Core, GateTile kGate>
void launch_prepare(const Params& p, const BackwardWorkspace& w, cudaStream_t stream);
template <class Core, bool kBackwards, int kGroups>
void launch_state(const Params& p, const BackwardWorkspace& w, const StatePass& pass, cudaStream_t stream);
template <class Core, int kGroups>
void launch_dv(const Params& p, const BackwardWorkspace& w, const Gradients& d, cudaStream_t stream);
template <class Core, GateTile kGate>
void launch_dq_dk_dg(const Params& p, const BackwardWorkspace& w, const Gradients& d, cudaStream_t stream);
// The rows of gate_parts beyond the key tiles.
template <class Core>
void launch_constant_gate_pairs(const Params& p, const BackwardWorkspace& w, const Strided& d_o, cudaStream_t stream);
// Sums parts [tiles, rows, G] into dg of scalar gates (a row a token) or constant gates, in a fixed order.
void launch_gate_sums(const Params& p, const float* parts, std::int64_t rows, int tiles, const Strided& dg,
                      cudaStream_t stream);

// The gradient token by token in f32, for whatever the table's rows take.
void recurrent_backward(Context& context, const Problem& problem, const Inputs& inputs, const Outputs& outputs,
                        const OutputGradients& d_out, const InputGradients& d_in);

}  // namespace flashgla::ops::gated_linear_attention::cuda
