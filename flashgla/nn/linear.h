// Linear layer, or several that read the same input and run as one matrix product.
#pragma once

#include <string>
#include <vector>

#include "flashgla/base/context.h"
#include "flashgla/nn/parameter.h"
#include "flashgla/ops/linear_step/linear_step.h"

namespace flashgla::nn {

// Where an output goes: to = residual + output, summed before it is rounded.
struct Output {
  TensorView to;        // absent: not wanted
  TensorView residual;  // absent: zero; may be `to`

  explicit operator bool() const { return static_cast<bool>(to); }
};

// y = x W^T + b, with W [out,in] the rows of the parts' weights one below the other. A checkpoint sees the parts; the
// columns of y are theirs in order.
class Linear {
 public:
  struct Part {
    std::string name;  // "<name>.weight" in the checkpoint
    std::int64_t out;
    Quantisation quantisation = Quantisation::mixer;
    Streamed streamed = Streamed::behind;  // of parts behind the first
  };
  // weights normal(0, deviation); bias: each part has one, zeros, named "<name>.bias".
  Linear(const std::vector<Part>& parts, std::int64_t in, double deviation, bool bias = false);

  void for_each_parameter(const ParameterVisitor& visit);

  std::int64_t in() const { return in_; }
  std::int64_t out() const { return out_; }
  DType dtype() const { return weights_.front().value.dtype; }
  // Columns of part i in y (any tensor whose last dimension is out()).
  TensorView part(const TensorView& y, std::size_t i) const;

  // x [...,in], y [...,out].
  void forward(Context& context, const TensorView& x, const Output& y) const;
  void forward(Context& context, const TensorView& x, const TensorView& y) const { forward(context, x, Output{y, {}}); }

  // This layer as one of a decoding step, with its output there: one for each run of parts whose weights lie behind one
  // another in one format.
  std::vector<ops::linear_step::Layer> step_layers(const TensorView& y) const;
  // The same as one layer, where all parts are of one format: for outputs that are not those of the product.
  ops::linear_step::Layer step_layer(const TensorView& y) const;
  // A decoding step of that one layer alone: y [N,out] of `inputs` [N,in], as linear_step::run has it.
  void step(Context& context, const ops::linear_step::Inputs& inputs, const TensorView& y,
            const ops::linear_step::Options& options = {}) const;

  // Adds to the gradients of weights and bias, or writes them (Parameter::holds_gradient); dx [...,in] is overwritten,
  // or added to with accumulate.
  void backward(Context& context, const TensorView& x, const TensorView& dy, const TensorView& dx,
                bool accumulate = false) const;
  // Its two halves, for who gets x from what needs dx.
  void backward_input(Context& context, const TensorView& dy, const TensorView& dx, bool accumulate = false) const;
  void backward_parameters(Context& context, const TensorView& x, const TensorView& dy) const;

 private:
  TensorView weight() const;
  TensorView weight_gradient() const;
  TensorView bias() const;  // of all parts; absent: none
  TensorView bias_gradient() const;

  std::int64_t in_;
  std::int64_t out_ = 0;
  std::vector<Parameter> weights_;
  std::vector<Parameter> biases_;  // none, or one a part
};

}  // namespace flashgla::nn
