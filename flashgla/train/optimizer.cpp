#include "flashgla/train/optimizer.h"

#include <cstddef>
#include <limits>

#include "flashgla/base/memory.h"
#include "flashgla/ops/arguments.h"
#include "flashgla/ops/elementwise/elementwise.h"
#include "flashgla/ops/global_norm/global_norm.h"

namespace flashgla::train {

namespace {

// Where decay ends and begins again in the flat block: adamw's boundaries.
std::vector<std::int64_t> decay_boundaries(const nn::ParameterStore& parameters) {
  std::vector<std::int64_t> boundaries;
  bool decays = true;
  std::int64_t begin = 0;
  for (const nn::Parameter* parameter : parameters.parameters()) {
    if (parameter->decay != decays) boundaries.push_back(begin);
    decays = parameter->decay;
    begin += parameter->shape.numel();
  }
  return boundaries;
}

}  // namespace

OptimizerState optimizer_state_from_name(std::string_view name) {
  if (name == "full") return OptimizerState::full;
  if (name == "split_master") return OptimizerState::split_master;
  if (name == "half") return OptimizerState::half;
  throw Error("optimizer_state: unknown '" + std::string(name) + "'; known: full, split_master, half");
}

Optimizer::Optimizer(Context& context, nn::ParameterStore& parameters, const OptimizerSettings& settings)
    : context_(context), parameters_(parameters), settings_{settings.beta1,        settings.beta2,     settings.epsilon,
                                                            settings.weight_decay, settings.clip_norm, settings.seed} {
  if (parameters.parameters().empty()) throw Error("optimizer: the model has no parameters");
  const TensorView& values = parameters.all_values();
  const Device device = values.device;
  const DType wide = ops::accumulator_of(values.dtype);
  const bool half = settings.state == OptimizerState::half && wide == DType::f32;
  first_moments_ = Tensor::zeros(values.shape, half ? DType::bf16 : wide, device);
  second_moments_ = Tensor::zeros(values.shape, half ? DType::bf16 : wide, device);
  if (values.dtype == DType::bf16) {
    if (settings.state == OptimizerState::full) {
      master_ = Tensor::empty(values.shape, DType::f32, device);
      ops::elementwise::convert(context, values, master_);
    } else {
      master_ = Tensor::zeros(values.shape, DType::u16, device);
    }
  }
  const std::vector<std::int64_t> boundaries = decay_boundaries(parameters);
  boundaries_ = Tensor::empty({static_cast<std::int64_t>(boundaries.size())}, DType::i64, device);
  copy_memory(boundaries_->data, device, boundaries.data(), Device::cpu(), boundaries_->bytes());
  scalars_ = Tensor::zeros({ops::adamw::kStepScalars}, DType::f64, device);
  sum_of_squares_ = Tensor::zeros({1}, DType::f64, device);
  pinned_ = allocate_pinned_memory(kInFlight * sizeof(Slot));
  slots_ = static_cast<Slot*>(pinned_.get());
  for (std::int64_t i = 0; i < kInFlight; ++i) {
    slots_[i] = Slot();
    reported_[static_cast<std::size_t>(i)] = std::make_unique<Event>(context.queue());
  }
}

void Optimizer::set_scalars(double learning_rate, double gradient_scale) {
  if (queued_ - read_ >= kInFlight) throw Error("optimizer: too many updates without their report");
  ops::adamw::StepScalars& sent = slots_[queued_ % kInFlight].sent;
  sent.learning_rate = learning_rate;
  sent.gradient_scale = gradient_scale;
  context_.queue().copy(scalars_->data, &sent, ops::adamw::kHostScalars * sizeof(double));
}

void Optimizer::queue_update(const TensorView& loss) {
  ops::global_norm::sum_of_squares(context_, parameters_.all_gradients(), sum_of_squares_);
  ops::adamw::prepare(context_, sum_of_squares_, loss, scalars_, settings_);
  ops::adamw::step(context_,
                   {parameters_.all_values(), parameters_.all_gradients(), first_moments_, second_moments_,
                    master_ ? master_.view() : TensorView(), boundaries_, scalars_},
                   settings_);
}

void Optimizer::queue_report() {
  Slot& slot = slots_[queued_ % kInFlight];
  context_.queue().copy(&slot.received, scalars_->data, sizeof(ops::adamw::StepScalars));
  reported_[static_cast<std::size_t>(queued_ % kInFlight)]->record();
  ++queued_;
}

bool Optimizer::report_is_there() const {
  return read_ < queued_ && reported_[static_cast<std::size_t>(read_ % kInFlight)]->passed();
}

TensorView Optimizer::made() const {
  constexpr std::int64_t kPlace = offsetof(ops::adamw::StepScalars, made) / sizeof(double);
  return scalars_->slice(0, kPlace, kPlace + 1);
}

TensorView Optimizer::counter() const {
  constexpr std::int64_t kPlace = offsetof(ops::adamw::StepScalars, updates) / sizeof(double);
  return scalars_->slice(0, kPlace, kPlace + 1);
}

UpdateReport Optimizer::next_report() {
  if (read_ == queued_) throw Error("optimizer: no update is without its report");
  reported_[static_cast<std::size_t>(read_ % kInFlight)]->synchronize();
  const ops::adamw::StepScalars& received = slots_[read_ % kInFlight].received;
  ++read_;
  if (received.made != 0.0) ++updates_;
  return {received.made != 0.0, received.gradient_norm, ""};
}

UpdateReport Optimizer::find_culprit() {
  UpdateReport report;
  report.done = false;
  report.gradient_norm = std::numeric_limits<double>::quiet_NaN();
  for (const nn::Parameter* parameter : parameters_.parameters()) {
    if (ops::global_norm::find_non_finite(context_, parameter->gradient)) {
      report.culprit = parameter->name;
      break;
    }
  }
  return report;
}

UpdateReport Optimizer::step(double learning_rate, double gradient_scale) {
  set_scalars(learning_rate, gradient_scale);
  queue_update();
  queue_report();
  const UpdateReport report = next_report();
  return report.done ? report : find_culprit();
}

void Optimizer::set_updates(std::int64_t updates) {
  updates_ = updates;
  auto& sent = slots_[queued_ % kInFlight].sent;
  sent.updates = static_cast<double>(updates);
  const std::size_t offset = offsetof(ops::adamw::StepScalars, updates);
  context_.queue().copy(static_cast<std::byte*>(scalars_->data) + offset, &sent.updates, sizeof(double));
  context_.queue().synchronize();
}

std::vector<TensorView> Optimizer::blocks() const {
  std::vector<TensorView> all = {first_moments_, second_moments_};
  if (master_) all.push_back(master_);
  return all;
}

std::vector<model::NamedTensor> Optimizer::tensors() const {
  std::vector<model::NamedTensor> result;
  std::int64_t begin = 0;
  for (const nn::Parameter* parameter : parameters_.parameters()) {
    const std::int64_t end = begin + parameter->shape.numel();
    const auto part = [&](const Tensor& all) { return all->slice(0, begin, end).reshape(parameter->shape); };
    result.push_back({"first_moment." + parameter->name, part(first_moments_)});
    result.push_back({"second_moment." + parameter->name, part(second_moments_)});
    if (master_) {
      const char* name = master_->dtype == DType::f32 ? "master." : "master_low_bits.";
      result.push_back({name + parameter->name, part(master_)});
    }
    begin = end;
  }
  return result;
}

}  // namespace flashgla::train
