// What generation carries from token to token.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "flashgla/mixers/config.h"
#include "flashgla/mixers/mixer.h"

namespace flashgla::model {

// The state of every layer for a number of sequences: entries of constant size in one block of memory, those that grow
// by token beside it, and how many tokens each sequence has had.
class DecodeState {
 public:
  // Of each layer, for that many sequences of at most so many tokens (Mixer::state_layout).
  using Layouts = std::vector<std::vector<mixers::StateEntry>>;
  using LayoutsOf = std::function<Layouts(std::int64_t sequences, std::int64_t capacity)>;

  // All zeros. Growing entries have room for `capacity` tokens of each sequence, which none can have more of than
  // most_tokens.
  DecodeState(LayoutsOf layouts_of, std::int64_t sequences, std::int64_t capacity, Device device,
              const mixers::MostTokens& most_tokens = {});

  std::int64_t sequences() const { return sequences_; }
  const mixers::LayerState& layer(std::size_t index) const { return layers_[index]; }
  std::size_t layer_count() const { return layers_.size(); }
  const std::vector<mixers::StateEntry>& layout(std::size_t index) const { return layouts_[index]; }

  // Whether steps append to a ring (Mixer::ring_layout) in any layer.
  bool has_ring() const;
  // Whether any entry grows; if not, capacity means nothing.
  bool grows() const { return bytes_per_token_ > 0; }
  std::int64_t capacity() const { return capacity_; }
  // Room for that many tokens of each sequence, whatever is there being kept; never less than before. Throws Error
  // where sequences cannot have so many.
  void reserve(std::int64_t capacity);

  std::size_t bytes() const;  // all of it
  std::size_t constant_bytes() const { return constant_->bytes(); }
  std::size_t bytes_per_token() const { return bytes_per_token_; }  // of each sequence, in growing entries

  // Entries of constant size of all layers, u8, for a copy of them: growing ones are never changed, only appended to.
  const TensorView& constant() const { return constant_.view(); }
  // The state of a layer with the constant entries of such a copy.
  mixers::LayerState layer_of(const TensorView& constant, std::size_t index) const;

  // i32 [N] on the state's device: tokens of each sequence since its reset. Advanced by the model.
  const TensorView& positions() const { return positions_.view(); }

  void reset();  // all zeros: the start of a sequence
  // Sequence i becomes a copy of sequence `from_i` of another state of the same model; one that grows must have no more
  // room there than here. Queued behind what computed it only on the default stream of the device.
  void copy_sequence(std::int64_t i, const DecodeState& from, std::int64_t from_i);
  // The same for what a queue's device does next; histories stay as they are.
  void queue_reset(const Queue& queue) const;
  void queue_reset_sequence(const Queue& queue, std::int64_t i) const;

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
  LayoutsOf layouts_of_;
  std::int64_t sequences_;
  std::int64_t capacity_;
  mixers::MostTokens most_tokens_;
  Device device_;
  Layouts layouts_;
  Tensor constant_;
  std::vector<std::vector<Tensor>> growing_;  // of each layer, in the order of its growing entries
  Tensor positions_;
  std::size_t bytes_per_token_ = 0;
  std::vector<mixers::LayerState> layers_;
};

}  // namespace flashgla::model
