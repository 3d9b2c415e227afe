#include "flashgla/nn/rms_norm.h"

#include "flashgla/ops/rms_norm/rms_norm.h"

namespace flashgla::nn {

RMSNorm::RMSNorm(const std::string& name, std::int64_t size, double epsilon) : epsilon_(epsilon) {
  weight_.name = name + ".weight";
  weight_.shape = Shape({size});
  weight_.initialization = Initialization::ones;
  weight_.decay = false;
}

void RMSNorm::forward(Context& context, const TensorView& x, const TensorView& residual, const TensorView& y,
                      const TensorView& sum, const TensorView& rstd) const {
  ops::rms_norm::Inputs inputs;
  inputs.x = x;
  inputs.residual = residual;
  inputs.weight = weight_.value;
  ops::rms_norm::Outputs outputs;
  outputs.y = y;
  outputs.sum = sum;
  outputs.rstd = rstd;
  ops::rms_norm::forward(context, inputs, outputs, epsilon_);
}

ops::linear_step::Inputs RMSNorm::before_step(const TensorView& x) const {
  ops::linear_step::Inputs inputs;
  inputs.x = x;
  inputs.prologue = ops::linear_step::Prologue::rms_norm;
  inputs.norm_weight = weight_.value;
  inputs.epsilon = epsilon_;
  return inputs;
}

void RMSNorm::backward(Context& context, const TensorView& x, const TensorView& rstd, const TensorView& dy,
                       const TensorView& dx, bool accumulate) const {
  ops::rms_norm::backward(context, x, weight_.value, rstd, dy, dx, accumulate, weight_.gradient);
}

}  // namespace flashgla::nn
