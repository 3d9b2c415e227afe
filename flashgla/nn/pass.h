// Pass: what one forward, and the backward after it, work with.
#pragma once

#include <cstdint>
#include <string_view>

#include "flashgla/base/context.h"
#include "flashgla/ops/dropout/dropout.h"

namespace flashgla::nn {

// What forward keeps for backward; the rest is computed again. Results are the same bits in every class.
enum class Recompute : std::uint8_t {
  nothing,      // keep everything
  activations,  // recompute normalisations, gates and activation functions
  block,        // keep each block's input only; its backward runs forward again
};

const char* name_of(Recompute recompute);
Recompute recompute_from_name(std::string_view name);  // throws Error that lists the names

// Where the sequences of a packed batch begin and end. Absent (default-constructed): each row is a sequence.
struct Sequences {
  TensorView bounds;            // i32 [N+1] on the context's device: 0, then where each sequence ends; batch is 1
  TensorView host;              // the same on the CPU (there the same memory); absent where a graph is captured
  std::int64_t max_seqlen = 0;  // no sequence is longer; 0: not told

  explicit operator bool() const { return static_cast<bool>(bounds); }
  // N; `rows`: the batch's rows, which are the sequences when none are packed.
  std::int64_t count(std::int64_t rows) const { return bounds ? bounds.size(0) - 1 : rows; }
};

// What falls out while training; nothing by default. Masks are a function of all of this and of the place, so that a
// forward that runs again has the same ones.
struct Dropout {
  double branches = 0.0;    // of what each part of a block adds to the residual stream
  double embeddings = 0.0;  // of what enters the first block
  double attention = 0.0;   // of the probabilities of softmax attention
  std::uint64_t seed = 0;
  TensorView step, micro_batch;  // ops::dropout::Mask's

  // Of the parts of layers: places_of(layer) and the ones behind it.
  ops::dropout::Mask branch_mask(std::int64_t place) const { return {branches, seed, place, step, micro_batch}; }
  ops::dropout::Mask embedding_mask() const { return {embeddings, seed, 0, step, micro_batch}; }
  static constexpr std::int64_t kPlacesALayer = 4;
  static std::int64_t places_of(std::int64_t layer) { return 1 + kPlacesALayer * layer; }
  // Of a layer's probabilities: the last of its places.
  ops::dropout::Mask attention_mask(std::int64_t layer) const {
    return {attention, seed, places_of(layer) + kPlacesALayer - 1, step, micro_batch};
  }
};

// Modules keep views of what they saved between a forward and the backward that follows it (one of each at a time);
// the memory is `saved`'s, released by the caller after backward.
struct Pass {
  Context& context;
  Arena* saved = nullptr;  // null: inference, nothing is kept and backward must not follow
  Recompute recompute = Recompute::nothing;
  Sequences sequences;
  // i32 [N] on the context's device: tokens that each sequence has had before this call, where the states that it
  // starts from are of. Absent: none.
  TensorView positions;
  Dropout dropout;
  bool repeated = false;  // keeps nothing, and a forward that does repeats it, with the same bits

  // The same for a forward that keeps nothing.
  Pass without_keeping() const {
    Pass pass = *this;
    pass.repeated = training();
    pass.saved = nullptr;
    pass.recompute = Recompute::nothing;
    return pass;
  }

  bool training() const { return saved != nullptr; }

  // Where forward puts a tensor that backward reads.
  Arena& keep() const { return saved ? *saved : context.scratch(); }
  // The same for one that backward can compute again without a projection or a scan.
  Arena& keep_or_recompute() const { return recompute == Recompute::nothing ? keep() : context.scratch(); }
  // Where an operator's forward puts the states that its backward reads, bytes() of them: u8, absent where there are
  // none to keep or backward computes them again.
  template <class Bytes>
  TensorView keep_states(const Bytes& bytes, const char* label) const {
    const std::size_t count = training() && recompute == Recompute::nothing ? bytes() : 0;
    if (count == 0) return {};
    return saved->tensor(Shape({static_cast<std::int64_t>(count)}), DType::u8, label);
  }
};

}  // namespace flashgla::nn
