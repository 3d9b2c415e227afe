#include "flashgla/nn/norm.h"

#include <array>

#include "flashgla/base/error.h"
#include "flashgla/ops/arguments.h"
#include "flashgla/ops/elementwise/elementwise.h"
#include "flashgla/ops/layer_norm/layer_norm.h"
#include "flashgla/ops/rms_norm/rms_norm.h"

namespace flashgla::nn {

namespace {

constexpr std::array kNormNames = {"rms_norm", "layer_norm"};

Parameter vector_of(const std::string& name, std::int64_t size, Initialization initialization) {
  Parameter vector;
  vector.name = name;
  vector.shape = Shape({size});
  vector.initialization = initialization;
  vector.decay = false;
  return vector;
}

// The mean and the deviation of rows [2, rows]; of RMSNorm there is no mean.
TensorView part_of(const TensorView& statistics, std::int64_t part) {
  return statistics ? statistics.select(0, part) : TensorView();
}

}  // namespace

const char* name_of(NormKind kind) { return kNormNames[static_cast<std::size_t>(kind)]; }

NormKind norm_kind_from_name(std::string_view name) {
  for (std::size_t i = 0; i < kNormNames.size(); ++i) {
    if (name == kNormNames[i]) return static_cast<NormKind>(i);
  }
  throw Error("norm: unknown kind '" + std::string(name) + "'; known: rms_norm, layer_norm");
}

Norm::Norm(const std::string& name, std::int64_t size, double epsilon, NormKind kind)
    : kind_(kind), weight_(vector_of(name + ".weight", size, Initialization::ones)), epsilon_(epsilon) {
  if (kind == NormKind::layer) bias_.push_back(vector_of(name + ".bias", size, Initialization::zeros));
}

void Norm::for_each_parameter(const ParameterVisitor& visit) {
  visit(weight_);
  for (Parameter& bias : bias_) visit(bias);
}

TensorView Norm::take_statistics(Arena& arena, const TensorView& x) const {
  const std::int64_t rows = ops::rows_of(x.shape);
  return arena.tensor(kind_ == NormKind::rms ? Shape({rows}) : Shape({2, rows}), ops::accumulator_of(x.dtype),
                      "norms: statistics");
}

void Norm::forward(Context& context, const TensorView& x, const TensorView& y, const TensorView& statistics) const {
  if (kind_ == NormKind::rms) {
    return ops::rms_norm::forward(context, {x, weight_.value}, {y, statistics}, epsilon_);
  }
  ops::layer_norm::forward(context, {x, weight_.value, bias_.front().value},
                           {y, part_of(statistics, 0), part_of(statistics, 1)}, epsilon_);
}

ops::linear_step::Inputs Norm::before_step(Context& context, const TensorView& x) const {
  ops::linear_step::Inputs inputs;
  if (kind_ == NormKind::layer) {
    inputs.x = context.scratch().tensor(x.shape, x.dtype, "norms: outputs");
    forward(context, x, inputs.x, {});
    return inputs;
  }
  inputs.x = x;
  inputs.prologue = ops::linear_step::Prologue::rms_norm;
  inputs.norm_weight = weight_.value;
  inputs.epsilon = epsilon_;
  return inputs;
}

void Norm::backward(Context& context, const TensorView& x, const TensorView& statistics, const TensorView& dy,
                    const TensorView& dx, bool accumulate) const {
  if (kind_ == NormKind::rms) {
    return ops::rms_norm::backward(context, x, weight_.value, statistics, dy, dx, accumulate, weight_.gradient);
  }
  ops::elementwise::column_sum(context, dy.as_rows(), bias_.front().gradient, true);
  ops::layer_norm::backward(context, x, weight_.value, part_of(statistics, 0), part_of(statistics, 1), dy, dx,
                            accumulate, weight_.gradient);
}

}  // namespace flashgla::nn
