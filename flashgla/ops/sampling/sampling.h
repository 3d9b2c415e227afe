// From logits to tokens, on the device that has the logits.
//
//     l_i = logits_i, or for tokens seen: l_i / penalty where l_i > 0, else l_i penalty
//     w_i = floor(2^43 exp((l_i - max l) / temperature))            a whole number: sums of these have no order
//     kept: the top_k largest; of these the largest that together reach top_p of their sum; of these those with
//           w_i >= min_p 2^43. Of equal ones the lower token comes first; the largest is always kept.
//     token = the first i in the token's order with  sum over kept j <= i of w_j  >  u sum over all kept w_j
//
// u in [0, 1) is a function of (seed, sequence, position) alone: a sequence's draws do not depend on what is generated
// beside it. Since weights are whole numbers and the exponential is computed in the same way everywhere
// (weights.h), equal logits give equal tokens on every device.
// temperature 0: the first of the largest l_i.
#pragma once

#include <cstdint>

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"

namespace flashgla::ops::sampling {

struct Options {
  double temperature = 1.0;         // 0: greedy
  std::int64_t top_k = 0;           // 0: all
  double top_p = 1.0;               // in (0, 1]
  double min_p = 0.0;               // in [0, 1]
  double repetition_penalty = 1.0;  // of tokens seen; 1: none
  std::uint64_t seed = 0;

  // Throws Error "sampling: <option> ...".
  void validate() const;
};

// What becomes of a sequence's draw: its token, or one of these.
constexpr std::int32_t kNotANumber = -1;  // a logit is NaN
constexpr std::int32_t kNoneFinite = -2;  // no logit is finite, or one is +infinity

// logits f32 [N,V], seen u8 [N,V] (not 0: seen; absent: none), positions i32 [N] (the draw's place in its sequence),
// tokens i32 [N] overwritten. Sequence n's draws are those of sequence first_sequence +
// n. V at most 2^20. Throws Error naming the argument.
void run(Context& context, const TensorView& logits, const TensorView& seen, const TensorView& positions,
         const TensorView& tokens, const Options& options, std::int64_t first_sequence = 0);

// Marks tokens as seen: i32 [N], one of each row of seen u8 [N,V]; or with bounds i32 [N+1] i32 [total], those in
// [bounds[n], bounds[n+1]) of row n. Tokens outside [0, V) are passed over. All contiguous.
void mark_seen(Context& context, const TensorView& tokens, const TensorView& bounds, const TensorView& seen);

// The weights w_i of the kept, 0 for the others: what run draws from. logits f32 [V], seen u8 [V] or absent, weights
// i64 [V] overwritten; on the CPU. Returns false where no token can be drawn.
bool distribution(const TensorView& logits, const TensorView& seen, const TensorView& weights, const Options& options);

}  // namespace flashgla::ops::sampling
