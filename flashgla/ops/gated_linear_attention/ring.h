// Decoding steps that seldom write the state: the last inputs stay in a ring beside it, and the state is written when a
// sequence's position is a multiple of kRing. Exact for decays of at most 1: what a token's output needs of the ring
// are products of decays, none of which is divided by another.
//
// The state of a sequence after t tokens is then h with the inputs of the last t % kRing tokens, in the ring's first
// rows, folded in. An input of zeros changes nothing, so that a ring of zeros says that h has all of them.
#pragma once

#include "flashgla/ops/gated_linear_attention/gated_linear_attention.h"

namespace flashgla::ops::gated_linear_attention {

constexpr std::int64_t kRing = 16;

struct Ring {
  TensorView inputs;     // [B,G,kRing,2K+V] of h's dtype, f32 or f64: phi(k), the log gate by key channel, and v
  TensorView positions;  // i32 [B]: tokens of each sequence before this one
  explicit operator bool() const { return static_cast<bool>(inputs); }
};

// Whether steps gain by a ring on such a device: where states are most of what a token reads and writes.
bool ring_pays(Device device, std::int64_t batch);

// step beside a ring: no gate over values, no normalize, h f32 (f64 with f64). Where an implementation has none for
// such a problem it folds the ring into h first and leaves zeros in it.
void step(Context& context, const StepInputs& inputs, const Ring& ring, const TensorView& h, const TensorView& o,
          const Options& options = {});

// to [B,G,K,V] = h with the ring's inputs folded in; may be h.
void fold(Context& context, const Ring& ring, const TensorView& h, const TensorView& to);

}  // namespace flashgla::ops::gated_linear_attention
