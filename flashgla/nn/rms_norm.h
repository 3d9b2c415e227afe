// RMSNorm layer: y = x / sqrt(mean(x^2) + epsilon) * weight over the last dimension.
#pragma once

#include <string>

#include "flashgla/base/context.h"
#include "flashgla/nn/parameter.h"
#include "flashgla/ops/linear_step/linear_step.h"

namespace flashgla::nn {

class RMSNorm {
 public:
  RMSNorm(const std::string& name, std::int64_t size, double epsilon);

  void for_each_parameter(const ParameterVisitor& visit) { visit(weight_); }

  // With `residual`, sum = x + residual is normalised (and written). rstd f32 [rows] (f64 with f64) for backward;
  // absent: inference.
  void forward(Context& context, const TensorView& x, const TensorView& residual, const TensorView& y,
               const TensorView& sum, const TensorView& rstd) const;

  // x [N,D] normalised as the prologue of a decoding step's linear layers.
  ops::linear_step::Inputs before_step(const TensorView& x) const;

  // x: what was normalised. Adds to the weight's gradient; dx is added to.
  void backward(Context& context, const TensorView& x, const TensorView& rstd, const TensorView& dy,
                const TensorView& dx, bool accumulate) const;

 private:
  Parameter weight_;
  double epsilon_;
};

}  // namespace flashgla::nn
