// A token mixer: the part of a block that moves information along the sequence. Model, trainer, generator and server
// know this interface only; a new mixer is a folder beside this file and one row in registry.cpp.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "flashgla/mixers/config.h"
#include "flashgla/nn/parameter.h"
#include "flashgla/nn/pass.h"

namespace flashgla::mixers {

// One tensor of the state that a layer carries from token to token.
struct StateEntry {
  std::string name;  // "h", "conv_q", "k"
  Shape shape;       // first dimension: sequences; of a growing entry the second: tokens it has room for
  DType dtype = DType::f32;
  // false: of constant size, another content after each call. true: a row is appended for each token and rows are never
  // changed, so that `before` and `after` of a call may be the same memory; how many rows are filled is the
  // sequence's position (nn::Pass::positions).
  bool growing = false;
};

// The state of one layer: views in the order of Mixer::state_layout. Empty: zeros in, or not wanted out.
using LayerState = std::vector<TensorView>;

class Mixer {
 public:
  virtual ~Mixer() = default;

  virtual void for_each_parameter(const nn::ParameterVisitor& visit) = 0;

  // What a layer carries for this many sequences of at most `capacity` tokens (which only growing entries look at).
  virtual std::vector<StateEntry> state_layout(std::int64_t sequences, std::int64_t capacity) const = 0;

  // y = mix(x); x, y [B,T,D] contiguous. `before` is the state that the sequences start from, `after` receives the
  // state that they end with; no overlap but of growing entries, and with pass.saved `before` stays as it is until
  // backward. y absent: only what backward needs (and `after`) is computed.
  virtual void forward(nn::Pass& pass, const TensorView& x, const TensorView& y, const LayerState& before,
                       const LayerState& after) = 0;

  // dx overwritten; parameters' gradients accumulated. No gradient flows into the state before (truncated
  // back-propagation through time). x as in forward.
  virtual void backward(nn::Pass& pass, const TensorView& x, const TensorView& dy, const TensorView& dx) = 0;

  // One token a sequence: x, y [B,D]; the state is updated in place. Nothing is kept.
  virtual void step(nn::Pass& pass, const TensorView& x, const TensorView& y, const LayerState& state) = 0;
};

// One row a mixer.
struct Registration {
  const char* name;  // "model_type" in config.json
  const char* summary;
  // Throws Error naming the field when the config asks for what the mixer cannot do.
  std::unique_ptr<Mixer> (*create)(const MixerConfig& config, std::int64_t layer);
};

std::span<const Registration> registry();
const Registration& find_mixer(std::string_view name);  // throws Error that lists the names

}  // namespace flashgla::mixers
