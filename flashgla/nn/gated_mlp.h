// SwiGLU feed-forward layer (Shazeer 2020): y = W_down (silu(W_gate x) * W_up x).
#pragma once

#include <string>

#include "flashgla/nn/linear.h"
#include "flashgla/nn/norm.h"
#include "flashgla/nn/pass.h"

namespace flashgla::nn {

class GatedMLP {
 public:
  // Parameters "<name>.gate_proj.weight", ".up_proj.weight" [intermediate, hidden], ".down_proj.weight"
  // [hidden, intermediate].
  GatedMLP(const std::string& name, std::int64_t hidden, std::int64_t intermediate, double deviation);

  void for_each_parameter(const ParameterVisitor& visit);

  // x, y [...,hidden]. y absent: only what backward needs is computed.
  void forward(Pass& pass, const TensorView& x, const Output& y);
  // A decoding step: x [N,hidden] += mlp(norm(x)).
  void step(Pass& pass, const Norm& norm, const TensorView& x) const;
  // x as in forward; dx overwritten.
  void backward(Pass& pass, const TensorView& x, const TensorView& dy, const TensorView& dx);

 private:
  Linear gate_up_;
  Linear down_;
  TensorView gate_up_values_;  // [rows, 2 intermediate], kept for backward, which leaves their gradients there
};

}  // namespace flashgla::nn
