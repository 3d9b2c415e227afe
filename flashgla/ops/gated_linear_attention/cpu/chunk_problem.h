// What the chunk form's host code and its SIMD sources share: the shape of a problem, and one task of it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "flashgla/ops/gated_linear_attention/cpu/tasks.h"

namespace flashgla::ops::gated_linear_attention::chunk {

constexpr std::int64_t kBlock = 32;         // tokens of a chunk
constexpr std::int64_t kSegmentBlocks = 4;  // chunks between two kept states
constexpr std::int64_t kSegment = kBlock * kSegmentBlocks;
// Base-2 logarithm of the largest decay over a chunk that is divided out and multiplied back in (README.md).
constexpr float kRange = 56.0f;

struct Shapes {
  std::int64_t K, V;
  std::int64_t group;   // query heads that share the state
  std::int64_t values;  // rows of the state: V, and the normaliser as one more value channel that is always 1
  std::int64_t ldk;     // row stride of matrices [.][K]; a power of two would use few cache sets
  std::int64_t ldv;     // of matrices [.][V]
  GateKind gate;
  FeatureMap feature_map;
  bool normalize;
  bool gate_values;  // gv given
  float scale;
  std::int64_t columns;      // of the states that callers see, [K][columns]: V, also where this is a slice of it
  std::int64_t kept_floats;  // from one kept state to the next

  explicit Shapes(const Problem& p)
      : K(p.key_dim),
        V(p.value_dim),
        group(p.group()),
        values(p.value_dim + (p.normalize ? 1 : 0)),
        ldk(padded(p.key_dim) + kLane),
        ldv(padded(values) + kLane),
        gate(p.gate),
        feature_map(p.feature_map),
        normalize(p.normalize),
        gate_values(p.gate == GateKind::key_value),
        scale(p.normalize ? 1.0f : static_cast<float>(p.scale)),
        columns(p.value_dim),
        kept_floats(values * ldk) {}

  // The same with `count` of the value channels. Not with a normaliser or gates over values.
  Shapes slice(std::int64_t count) const {
    Shapes part = *this;
    part.V = part.values = count;
    part.ldv = padded(count) + kLane;
    return part;
  }

  bool key_gates() const { return gate == GateKind::key || gate == GateKind::key_value; }
  std::int64_t state_floats() const { return values * ldk; }
};

// Inside, states are kept transposed, [values][ldk] with zeros behind K.
struct ForwardTask : gated_linear_attention::ForwardTask {  // o absent: only the states
  const float* start = nullptr;                             // the state before the first token as kept; absent: h0, z0
  float* states = nullptr;                                  // at the start of each segment; absent: not kept
};

struct BackwardTask : gated_linear_attention::BackwardTask {  // dg_sum: a term of each segment
  const float* d_end = nullptr;   // gradient of the state after the last token as kept; absent: d_ht and d_zt
  const float* states = nullptr;  // at the start of each segment
  float* d_states = nullptr;      // backward_states_task: gradients of the states at the end of each segment
};

// Workspace in floats of one worker.
std::int64_t forward_workspace(const Shapes& shapes);
std::int64_t backward_workspace(const Shapes& shapes);

void forward_task(const Shapes& shapes, const ForwardTask& task, float* workspace);
void backward_task(const Shapes& shapes, const BackwardTask& task, float* workspace);
// Only the states' gradients: d_states, dh0. Not with a normaliser, whose divisor needs the states themselves.
void backward_states_task(const Shapes& shapes, const BackwardTask& task, float* workspace);

}  // namespace flashgla::ops::gated_linear_attention::chunk
