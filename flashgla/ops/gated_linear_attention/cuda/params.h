// What kernels are told of a call: pointers, strides in elements, sizes. Plain values, passed by value to kernels.
// Built by params.cu from the plan and the validated views.
#pragma once

#include <cstdint>
#include <limits>

#include "flashgla/ops/gated_linear_attention/problem.h"

namespace flashgla::ops::gated_linear_attention::cuda {

constexpr int kChunk = 64;  // tokens of a chunk; chunks start anew with each sequence
constexpr int kFoundEveryLog2 = 2, kFoundEvery = 1 << kFoundEveryLog2;  // PLAN.md, "states"
constexpr float kLog2E = 1.4426950408889634f;

// Matrices of bf16 between kernels are cut into tiles of 64x64, each an image of its place in shared memory.
constexpr int kTile = 64;
constexpr std::int64_t kImageBytes = kTile * kTile * 2;
constexpr int tiles_of(int channels) { return (channels + kTile - 1) / kTile; }

// How gates come: none, one for all tokens, one a token; key gates of bf16, as logits (Hopper), of f32. Kernels are
// apart by it, for code that lies between what every block runs makes short calls wait for instructions. Some take a
// constant gate for one a token, and logits for gates of bf16.
enum class GatesAs { none, constant, tokens, bf16, logits, f32 };

// [B, T, heads, channels] with contiguous channels, or [B, T, heads] (channels 1), or [heads] (batch and token 0).
struct Strided {
  void* data = nullptr;
  std::int64_t batch = 0, token = 0, head = 0;
};

struct Gradients {
  Strided d_o, dq, dk, dv, dg;  // without data: not wanted
};

// Where the sequences lie. Chunk c of sequence n is number chunk_begin(n) + c among all chunks of the call.
struct Sequences {
  std::int64_t count = 0;                     // N
  std::int64_t length = 0;                    // T: of each sequence, or of all together when packed
  bool packed = false;                        // one after the other, within one row of the batch
  bool may_be_idle = false;                   // of the second of two ways to run a call (plan_chunks_by_length)
  std::int64_t longest = 0;                   // tokens of the longest, packed 0 where the host does not know it
  const void* cu_seqlens = nullptr;           // device, [N+1]; null where not packed
  bool wide = false;                          // cu_seqlens is i64, else i32
  const std::int64_t* chunk_begin = nullptr;  // device, [N+1], written by plan_chunks; null when not packed
  std::int64_t most_chunks = 0;               // upper bound of the chunks of all sequences, known on the host

  // Chunks of one sequence when not packed.
  constexpr std::int64_t chunks_each() const { return (length + kChunk - 1) / kChunk; }
  constexpr std::int64_t tokens() const { return packed ? length : count * length; }  // of all
};

struct Params {
  Strided q, k, v, g, gv, o;
  const void* h0 = nullptr;  // f32 [N,G,K,V], contiguous
  void* ht = nullptr;        // as h0
  const void* z0 = nullptr;  // f32 [N,G,K]
  void* zt = nullptr;
  // Chunk START states, h before the chunk's first token: images [slots, G, key tiles, value tiles], rows key channels,
  // zeros beyond K and V.
  void* states = nullptr;
  Sequences sequences;
  int heads = 1, group = 1;  // G; H / G
  int key_dim = 1, value_dim = 1;
  GateKind gate = GateKind::none;
  FeatureMap feature_map = FeatureMap::identity;
  DType dtype = DType::f32, gate_dtype = DType::f32;
  bool normalize = false;
  float scale = 1.0f;
  // Above 0: key gates of bf16 are logits x, whose log gates are log(sigmoid(x)) times this, no less than gate_min.
  float logit_scale = 0.0f, gate_min = -std::numeric_limits<float>::infinity();
  // Of heads wider than a tile a gate tells whether gate_min has cut it off: logits below cut_logits become cut_gates,
  // others no less than kept_gates, the next number. Two of bf16 each, rounded up, down and up; without a least gate
  // none is cut off (-inf, NaN, -inf).
  std::uint32_t cut_logits = 0xff80ff80u, cut_gates = 0x7fff7fffu, kept_gates = 0xff80ff80u;

  // Chunks from one kept state to the next: a power of two, since kernels divide by it (States). The mask is one
  // less, an operand as it lies in constant memory; worked out in a kernel it takes registers that some do not have.
  int states_every_log2 = 0, states_mask = 0;
  constexpr int states_every() const { return 1 << states_every_log2; }
  // Whether the state before chunk `index` is kept, and that after it.
  constexpr bool keeps_state(int index) const { return (index & states_mask) == 0; }
  constexpr bool keeps_state_after(int index) const { return (index & states_mask) == states_mask; }
  // Slot of chunk `index` of sequence n, and how many there may be.
  constexpr std::int64_t state_slot(std::int64_t chunk_begin, std::int64_t n, std::int64_t index) const {
    return ((chunk_begin + n * (states_every() - 1)) >> states_every_log2) + (index >> states_every_log2);
  }
  constexpr std::int64_t state_slots() const {
    return state_slot(sequences.most_chunks, sequences.count, 0) + (states_every() == 1 ? 0 : 1);
  }
  // Bytes of one state and of all, and where a tile begins.
  constexpr std::int64_t state_bytes() const { return kImageBytes * tiles_of(key_dim) * tiles_of(value_dim); }
  constexpr std::int64_t states_bytes() const { return state_slots() * heads * state_bytes(); }
  constexpr std::int64_t state_tile(std::int64_t slot, int head, int key_tile, int value_tile) const {
    return (slot * heads + head) * state_bytes() + (key_tile * tiles_of(value_dim) + value_tile) * kImageBytes;
  }
};

}  // namespace flashgla::ops::gated_linear_attention::cuda
