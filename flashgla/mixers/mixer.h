// A token mixer: the part of a block that moves information along the sequence. Model, trainer, generator and server
// know this interface only; a new mixer is a folder beside this file and one row in registry.cpp.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "flashgla/mixers/config.h"
#include "flashgla/nn/linear.h"
#include "flashgla/nn/norm.h"
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
  bool ring = false;  // one of ring_layout
};

// Of one token in a sequence of that many (means over the sequence), in one layer.
struct Cost {
  double forward_flops = 0.0;
  double training_flops = 0.0;  // forward and backward
  double decode_bytes = 0.0;    // states read and written to decode one token behind `length` others

  Cost& operator+=(const Cost& other) {
    forward_flops += other.forward_flops;
    training_flops += other.training_flops;
    decode_bytes += other.decode_bytes;
    return *this;
  }
};

// The state of one layer: views in the order of Mixer::state_layout, and behind them, where the state has a ring, of
// ring_layout. Empty: zeros in, or not wanted out.
using LayerState = std::vector<TensorView>;

// Parameters that belong to a model and to no layer of it, such as HGRN2's lower bounds; owned by who builds the
// layers.
class SharedParameters {
 public:
  // The one of this name, which the first who asks describes; it stays where it is.
  nn::Parameter& get(const nn::Parameter& described);
  void for_each_parameter(const nn::ParameterVisitor& visit);

 private:
  std::vector<std::unique_ptr<nn::Parameter>> parameters_;
};

class Mixer {
 public:
  virtual ~Mixer() = default;

  virtual void for_each_parameter(const nn::ParameterVisitor& visit) = 0;

  // Takes what the layer reads of its model beside its own parameters; called once, before those are bound.
  virtual void share(SharedParameters&) {}

  // What a layer carries for this many sequences of at most `capacity` tokens (which only growing entries look at), in
  // a model whose parameters have this dtype. What sums up is f32 (f64 with f64); what is kept as it came, such as keys
  // and values, has the parameters' dtype.
  virtual std::vector<StateEntry> state_layout(std::int64_t sequences, std::int64_t capacity,
                                               DType parameters) const = 0;

  // What steps can append their inputs to, so that they seldom write what sums up: entries of constant size, which are
  // zeros where nothing waits in them. Empty: steps have no use for it.
  virtual std::vector<StateEntry> ring_layout(std::int64_t /*sequences*/, DType /*parameters*/) const { return {}; }
  // Folds what waits in the state's ring into what sums up, in place. positions i32 [sequences]: tokens so far.
  virtual void fold_ring(Context&, const LayerState& /*state*/, const TensorView& /*positions*/) const {}

  // y = mix(x), with what nn::Output adds to it; x, y [B,T,D] contiguous. `before` is the state that the sequences
  // start from, `after` receives the state that they end with; no overlap but of growing entries, and with pass.saved
  // `before` stays as it is until backward. y absent: only what backward needs (and `after`) is computed.
  virtual void forward(nn::Pass& pass, const TensorView& x, const nn::Output& y, const LayerState& before,
                       const LayerState& after) = 0;

  // dx overwritten; parameters' gradients accumulated. No gradient flows into the state before (truncated
  // back-propagation through time). x as in forward.
  virtual void backward(nn::Pass& pass, const TensorView& x, const TensorView& dy, const TensorView& dx) = 0;

  // What a token costs beside the products with its parameters (nn::Parameter::multiplied).
  virtual Cost cost(std::int64_t length) const = 0;

  // What steps read that is a function of the parameters alone, such as Hyena's filter: kept by the layer, made when a
  // state is made and stale once parameters change. `activations`: dtype of a forward.
  virtual bool prepares_steps() const { return false; }
  virtual void prepare_steps(Context&, DType /*activations*/) {}

  // One token a sequence: x [B,D] += mix(norm(x)), norm being that of the residual stream in front of the mixer, so
  // that it and the sum can be fused with the layers beside them (ops::linear_step). The state is updated in place.
  // Nothing is kept.
  virtual void step(nn::Pass& pass, const nn::Norm& norm, const TensorView& x, const LayerState& state) = 0;
};

}  // namespace flashgla::mixers
