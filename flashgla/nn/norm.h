// A normalisation layer over the last dimension: RMSNorm y = x / sqrt(mean(x^2) + epsilon) * weight, or LayerNorm
// y = (x - mean(x)) / sqrt(var(x) + epsilon) * weight + bias.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "flashgla/base/context.h"
#include "flashgla/nn/parameter.h"
#include "flashgla/ops/linear_step/linear_step.h"

namespace flashgla::nn {

enum class NormKind : std::uint8_t { rms, layer };

const char* name_of(NormKind kind);                   // "rms_norm", "layer_norm"
NormKind norm_kind_from_name(std::string_view name);  // throws Error that lists the names

class Norm {
 public:
  // Parameters "<name>.weight" and, of LayerNorm, "<name>.bias".
  Norm(const std::string& name, std::int64_t size, double epsilon, NormKind kind = NormKind::rms);

  void for_each_parameter(const ParameterVisitor& visit);

  // Room for what a forward over x leaves for backward: f32 (f64 with f64).
  TensorView take_statistics(Arena& arena, const TensorView& x) const;

  // y may be x. statistics absent: inference.
  void forward(Context& context, const TensorView& x, const TensorView& y, const TensorView& statistics) const;

  // x [N,D] normalised, as what a decoding step's linear layers read: in their prologue, or here into scratch.
  ops::linear_step::Inputs before_step(Context& context, const TensorView& x) const;

  // x: what was normalised. Adds to the parameters' gradients; dx is added to, or overwritten and then may be dy.
  void backward(Context& context, const TensorView& x, const TensorView& statistics, const TensorView& dy,
                const TensorView& dx, bool accumulate) const;

 private:
  NormKind kind_;
  Parameter weight_;
  std::vector<Parameter> bias_;  // none, or one
  double epsilon_;
};

}  // namespace flashgla::nn
