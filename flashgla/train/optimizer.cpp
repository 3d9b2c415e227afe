#include "flashgla/train/optimizer.h"

#include <cmath>
#include <limits>

#include "flashgla/ops/adamw/adamw.h"
#include "flashgla/ops/global_norm/global_norm.h"

namespace flashgla::train {

Optimizer::Optimizer(Context& context, nn::ParameterStore& parameters, const OptimizerSettings& settings)
    : context_(context), parameters_(parameters), settings_(settings) {
  if (parameters.parameters().empty()) throw Error("optimizer: the model has no parameters");
  const DType parameter_dtype = parameters.parameters().front()->value.dtype;
  const DType dtype = parameter_dtype == DType::f64 ? DType::f64 : DType::f32;
  const bool master = parameter_dtype == DType::bf16;
  const std::int64_t count = parameters.count();
  memory_ = Tensor::zeros({(master ? 3 : 2) * count}, dtype, parameters.parameters().front()->value.device);
  moment_bytes_ = 2 * static_cast<std::size_t>(count) * size_of(dtype);
  std::int64_t offset = 0;
  for (nn::Parameter* parameter : parameters.parameters()) {
    const std::int64_t size = parameter->value.numel();
    const auto part = [&](int which) {
      const std::int64_t begin = which * count + offset;
      return memory_->slice(0, begin, begin + size).reshape(parameter->shape);
    };
    Slot slot{parameter, part(0), part(1), master ? part(2) : TensorView()};
    if (master) copy(parameter->value, slot.master);
    slots_.push_back(slot);
    offset += size;
  }
}

UpdateReport Optimizer::find_culprit() {
  UpdateReport report;
  report.done = false;
  report.gradient_norm = std::numeric_limits<double>::quiet_NaN();
  for (const Slot& slot : slots_) {
    if (ops::global_norm::find_non_finite(context_, slot.parameter->gradient)) {
      report.culprit = slot.parameter->name;
      break;
    }
  }
  return report;
}

UpdateReport Optimizer::step(double learning_rate, double gradient_scale) {
  UpdateReport report;
  double squares = 0.0;
  for (const Slot& slot : slots_) squares += ops::global_norm::sum_of_squares(context_, slot.parameter->gradient);
  report.gradient_norm = std::sqrt(squares) * gradient_scale;
  if (!std::isfinite(report.gradient_norm)) return find_culprit();
  const bool clip = settings_.clip_norm > 0.0 && report.gradient_norm > settings_.clip_norm;
  ++updates_;
  ops::adamw::Settings settings;
  settings.learning_rate = learning_rate;
  settings.beta1 = settings_.beta1;
  settings.beta2 = settings_.beta2;
  settings.epsilon = settings_.epsilon;
  settings.gradient_scale = gradient_scale * (clip ? settings_.clip_norm / report.gradient_norm : 1.0);
  settings.step = updates_;
  for (const Slot& slot : slots_) {
    settings.weight_decay = slot.parameter->decay ? settings_.weight_decay : 0.0;
    ops::adamw::step(
        context_, {slot.parameter->value, slot.parameter->gradient, slot.first_moment, slot.second_moment, slot.master},
        settings);
  }
  return report;
}

std::vector<model::NamedTensor> Optimizer::tensors() const {
  std::vector<model::NamedTensor> result;
  for (const Slot& slot : slots_) {
    result.push_back({"first_moment." + slot.parameter->name, slot.first_moment});
    result.push_back({"second_moment." + slot.parameter->name, slot.second_moment});
    if (slot.master) result.push_back({"master." + slot.parameter->name, slot.master});
  }
  return result;
}

}  // namespace flashgla::train
