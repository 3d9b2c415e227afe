// Decoding: a session's tokens one after the other, each a draw and a step of the model, recorded once as graphs of the
// device.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "flashgla/base/context.h"
#include "flashgla/base/graph.h"
#include "flashgla/generate/session.h"
#include "flashgla/ops/sampling/sampling.h"

namespace flashgla::generate {

// While one lives, nothing else may use the context's scratch memory, and the session's state must have room for every
// token that is stepped (DecodeState::reserve). Neither a draw nor a step allocates or waits.
class Decoding {
 public:
  Decoding(Context& context, model::LanguageModel& model, Session& session, const ops::sampling::Options& sampling);
  Decoding(const Decoding&) = delete;
  Decoding& operator=(const Decoding&) = delete;

  // Queues the draw of each sequence's next token from its logits.
  void draw();
  // Queues the step that takes the last draw's tokens in: states, logits, and what was seen.
  void step();

  // Tokens of the earliest draw not yet asked for, one of each sequence; waits until they are there. At most two draws
  // may wait to be asked for. Valid until the next call. Throws Error when a sequence's logits allow no draw.
  std::span<const std::int32_t> tokens();

 private:
  static constexpr int kSlots = 2;

  // The tokens in a slot, which have arrived; throws as tokens() does.
  std::span<const std::int32_t> checked(int slot) const;

  Context& context_;
  model::LanguageModel& model_;
  Session& session_;
  struct GrowAgain {
    Arena& arena;
    ~GrowAgain() { arena.grow_again(); }
  } grow_again_;
  ops::sampling::Options sampling_;
  Tensor tokens_;               // i32 [N], of the last draw
  std::shared_ptr<void> host_;  // pinned: i32 [kSlots,N]
  std::unique_ptr<Event> arrived_[kSlots];
  std::int64_t drawn_ = 0, given_ = 0;  // draws
  std::unique_ptr<Graph> draw_, step_;
};

}  // namespace flashgla::generate
