#include "flashgla/nn/linear.h"

#include "flashgla/ops/elementwise/elementwise.h"
#include "flashgla/ops/matmul/matmul.h"
#include "flashgla/ops/quantised_linear/quantised_linear.h"

namespace flashgla::nn {

Linear::Linear(const std::vector<Part>& parts, std::int64_t in, double deviation, bool bias) : in_(in) {
  for (const Part& part : parts) {
    Parameter weight;
    weight.name = part.name + ".weight";
    weight.shape = Shape({part.out, in});
    weight.deviation = deviation;
    weight.first_written_over = true;
    // Parts are one matrix, and a panel of one must not hold rows of the next.
    const bool whole = parts.size() == 1 || part.out % ops::quantised_linear::kPanelRows == 0;
    weight.quantisation = whole ? part.quantisation : Quantisation::none;
    if (!weights_.empty()) weight.streamed = part.streamed;
    weights_.push_back(std::move(weight));
    out_ += part.out;
    if (!bias) continue;
    Parameter vector;
    vector.name = part.name + ".bias";
    vector.shape = Shape({part.out});
    vector.initialization = Initialization::zeros;
    vector.decay = false;
    vector.first_written_over = true;
    biases_.push_back(std::move(vector));
  }
}

void Linear::for_each_parameter(const ParameterVisitor& visit) {
  for (Parameter& weight : weights_) visit(weight);
  for (Parameter& bias : biases_) visit(bias);
}

TensorView Linear::part(const TensorView& y, std::size_t i) const {
  std::int64_t begin = 0;
  for (std::size_t before = 0; before < i; ++before) begin += weights_[before].shape[0];
  return y.slice(-1, begin, begin + weights_[i].shape[0]);
}

TensorView Linear::weight() const {
  std::vector<TensorView> views;
  for (const Parameter& weight : weights_) views.push_back(weight.value);
  return adjacent_rows(views);
}

TensorView Linear::weight_gradient() const {
  std::vector<TensorView> views;
  for (const Parameter& weight : weights_) views.push_back(weight.gradient);
  return adjacent_rows(views);
}

namespace {
// Vectors that follow each other in memory as one.
TensorView adjacent(std::vector<TensorView> vectors) {
  if (vectors.empty() || !vectors.front()) return {};
  for (TensorView& vector : vectors) vector = vector.reshape(Shape({vector.numel(), 1}));
  const TensorView all = adjacent_rows(vectors);
  return all.reshape(Shape({all.numel()}));
}
}  // namespace

TensorView Linear::bias() const {
  std::vector<TensorView> views;
  for (const Parameter& bias : biases_) views.push_back(bias.value);
  return adjacent(std::move(views));
}

TensorView Linear::bias_gradient() const {
  std::vector<TensorView> views;
  for (const Parameter& bias : biases_) views.push_back(bias.gradient);
  return adjacent(std::move(views));
}

std::vector<ops::linear_step::Layer> Linear::step_layers(const TensorView& y) const {
  const TensorView all_biases = bias();
  std::vector<ops::linear_step::Layer> layers;
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < weights_.size();) {
    TensorView weight = weights_[i].value;
    std::int64_t end = begin + weights_[i].shape[0];
    for (++i; i < weights_.size() && are_adjacent(weight, weights_[i].value); ++i) {
      weight.shape[0] += weights_[i].value.size(0);
      end += weights_[i].shape[0];
    }
    layers.push_back({weight, all_biases ? all_biases.slice(0, begin, end) : TensorView(), y.slice(-1, begin, end)});
    begin = end;
  }
  return layers;
}

void Linear::forward(Context& context, const TensorView& x, const Output& y) const {
  if (weights_.front().observe) weights_.front().observe(context, x.as_rows());
  std::int64_t begin = 0;
  for (const ops::linear_step::Layer& layer : step_layers(y.to.as_rows())) {
    const std::int64_t end = begin + layer.y.size(1);
    const TensorView addend = y.residual ? y.residual.as_rows().slice(-1, begin, end) : TensorView();
    ops::quantised_linear::multiply(context, x.as_rows(), layer.weight, layer.y, {false, layer.bias, addend});
    begin = end;
  }
}

ops::linear_step::Layer Linear::step_layer(const TensorView& y) const { return {weight(), bias(), y}; }

void Linear::step(Context& context, const ops::linear_step::Inputs& inputs, const TensorView& y,
                  const ops::linear_step::Options& options) const {
  const ops::linear_step::Layer layer = step_layer(y);
  ops::linear_step::run(context, inputs, {&layer, 1}, options);
}

void Linear::backward(Context& context, const TensorView& x, const TensorView& dy, const TensorView& dx,
                      bool accumulate) const {
  backward_input(context, dy, dx, accumulate);
  backward_parameters(context, x, dy);
}

void Linear::backward_input(Context& context, const TensorView& dy, const TensorView& dx, bool accumulate) const {
  ops::matmul::Options options;
  options.accumulate = accumulate;
  ops::matmul::run(context, dy.as_rows(), weight(), dx.as_rows(), options);
}

void Linear::backward_parameters(Context& context, const TensorView& x, const TensorView& dy) const {
  const TensorView dy_rows = dy.as_rows();
  ops::matmul::Options options;
  options.accumulate = true;
  for (const Parameter& part : weights_) options.accumulate = part.holds_gradient();  // the same of all
  ops::matmul::run(context, dy_rows.transpose(0, 1), x.as_rows(), weight_gradient(), options);
  if (biases_.empty()) return;
  bool accumulate_bias = true;
  for (const Parameter& bias : biases_) accumulate_bias = bias.holds_gradient();
  ops::elementwise::column_sum(context, dy_rows, bias_gradient(), accumulate_bias);
}

}  // namespace flashgla::nn
