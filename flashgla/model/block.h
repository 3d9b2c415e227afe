// One layer of the model: parts one after the other, each x += branch(norm(x)) (pre-norm residual stream).
#pragma once

#include <memory>
#include <vector>

#include "flashgla/mixers/mixer.h"
#include "flashgla/model/config.h"
#include "flashgla/nn/norm.h"

namespace flashgla::model {

class Block {
 public:
  // A mixer and, where the config says so, an MLP or what the mixer brings in its place. Parameters are named
  // "model.layers.<layer>.<...>".
  Block(const ModelConfig& config, std::int64_t layer);

  void for_each_parameter(const nn::ParameterVisitor& visit);
  void share(mixers::SharedParameters& shared);  // once, before parameters are bound
  // Of all parts, in order; so are the states below. With `ring` what steps append to lies behind them.
  std::vector<mixers::StateEntry> state_layout(std::int64_t sequences, std::int64_t capacity, DType parameters,
                                               bool ring = false) const;
  // As of a Mixer.
  void fold_ring(Context& context, const mixers::LayerState& state, const TensorView& positions) const;
  mixers::Cost cost(std::int64_t length) const;

  // x, y [B,T,D]; y may be x without pass.saved, and otherwise x must stay as it is until backward. States as in
  // Mixer::forward.
  void forward(nn::Pass& pass, const TensorView& x, const TensorView& y, const mixers::LayerState& before,
               const mixers::LayerState& after);

  // d [B,T,D]: the gradient of y on entry, that of x on return.
  void backward(nn::Pass& pass, const TensorView& x, const TensorView& d);

  // As of a Mixer.
  bool prepares_steps() const;
  void prepare_steps(Context& context, DType activations);

  // One token a sequence, x [N,D] in place. Nothing is kept.
  void step(nn::Pass& pass, const TensorView& x, const mixers::LayerState& state);

 private:
  struct Part {
    nn::Norm norm;
    std::unique_ptr<mixers::Mixer> branch;  // an MLP is a mixer that mixes nothing
    std::size_t states;                     // entries of its state
    std::size_t rings;                      // of its ring, where the state has one

    struct Saved {
      TensorView in;          // [B,T,D]: what the norm reads, the block's x or a sum kept here
      TensorView normalized;  // [B,T,D]: recomputed in class activations
      TensorView statistics;  // the norm's
    } saved;
  };

  void add_part(nn::Norm norm, std::unique_ptr<mixers::Mixer> branch);
  // What of the block's state is the part's.
  mixers::LayerState state_of(const mixers::LayerState& state, const Part& part) const;
  // y absent: only what backward needs.
  void run_forward(nn::Pass& pass, const TensorView& x, const TensorView& y, const mixers::LayerState& before,
                   const mixers::LayerState& after);
  void run_backward(nn::Pass& pass, const TensorView& d);

  // Of the sum of the residual stream and part i's branch.
  ops::dropout::Mask mask_of(const nn::Pass& pass, std::size_t i) const {
    return pass.dropout.branch_mask(nn::Dropout::places_of(layer_) + static_cast<std::int64_t>(i));
  }

  std::int64_t layer_;
  std::vector<Part> parts_;
  mixers::LayerState saved_before_;  // class block
};

}  // namespace flashgla::model
