// One layer of the model, pre-norm residual: x + mixer(norm(x)), then that + mlp(norm(that)).
#pragma once

#include <memory>

#include "flashgla/mixers/mixer.h"
#include "flashgla/model/config.h"
#include "flashgla/nn/gated_mlp.h"
#include "flashgla/nn/rms_norm.h"

namespace flashgla::model {

class Block {
 public:
  // Parameters are named "model.layers.<layer>.<...>".
  Block(const ModelConfig& config, std::int64_t layer);

  void for_each_parameter(const nn::ParameterVisitor& visit);
  const mixers::Mixer& mixer() const { return *mixer_; }

  // x, y [B,T,D]; y may be x without pass.saved, and otherwise x must stay as it is until backward. States as in
  // Mixer::forward.
  void forward(nn::Pass& pass, const TensorView& x, const TensorView& y, const mixers::LayerState& before,
               const mixers::LayerState& after);

  // d [B,T,D]: the gradient of y on entry, that of x on return.
  void backward(nn::Pass& pass, const TensorView& x, const TensorView& d);

  // One token a sequence, x [N,D] in place.
  void step(nn::Pass& pass, const TensorView& x, const mixers::LayerState& state);

 private:
  // y absent: only what backward needs.
  void run_forward(nn::Pass& pass, const TensorView& x, const TensorView& y, const mixers::LayerState& before,
                   const mixers::LayerState& after);
  void run_backward(nn::Pass& pass, const TensorView& x, const TensorView& d);

  nn::RMSNorm mixer_norm_;
  std::unique_ptr<mixers::Mixer> mixer_;
  nn::RMSNorm mlp_norm_;
  nn::GatedMLP mlp_;

  struct Saved {
    mixers::LayerState before;  // class block
    TensorView mixer_input;     // [B,T,D], normalised: recomputed in class activations
    TensorView mixer_rstd;      // [B*T]
    TensorView sum;             // [B,T,D]: x + mixer's output
    TensorView mlp_input;       // [B,T,D], normalised: recomputed in class activations
    TensorView mlp_rstd;        // [B*T]
  } saved_;
};

}  // namespace flashgla::model
