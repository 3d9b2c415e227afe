// What generation carries from token to token.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "flashgla/mixers/mixer.h"

namespace flashgla::model {

// The state of every layer for a number of sequences.
class DecodeState {
 public:
  // layouts: of each layer, for that many sequences (Mixer::state_layout). All zeros.
  DecodeState(std::vector<std::vector<mixers::StateEntry>> layouts, std::int64_t sequences, Device device);

  std::int64_t sequences() const { return sequences_; }
  const mixers::LayerState& layer(std::size_t index) const { return layers_[index]; }
  std::size_t layer_count() const { return layers_.size(); }
  const std::vector<mixers::StateEntry>& layout(std::size_t index) const { return layouts_[index]; }
  std::size_t bytes() const { return memory_->bytes(); }
  const TensorView& all() const { return memory_.view(); }  // flat, every layer
  // Views of another flat tensor as this state's layer: for a copy of it.
  mixers::LayerState layer_of(const TensorView& flat, std::size_t index) const;

  void reset();  // all zeros: the start of a sequence
  void reset_sequence(std::int64_t i);

  // What each sequence has seen since its reset: how many tokens, and their hash in order. Advanced by who gives the
  // model its tokens.
  struct History {
    std::int64_t tokens = 0;
    std::uint64_t hash = 0;
    void add(std::int32_t token);
    void add(std::span<const std::int32_t> tokens);
    friend bool operator==(const History&, const History&) = default;
  };
  std::vector<History> history;

 private:
  std::int64_t sequences_;
  std::vector<std::vector<mixers::StateEntry>> layouts_;
  Tensor memory_;
  std::vector<mixers::LayerState> layers_;
};

}  // namespace flashgla::model
