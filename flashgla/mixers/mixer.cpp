#include "flashgla/mixers/mixer.h"

namespace flashgla::mixers {

std::unique_ptr<Mixer> Config::create_mlp(const Common&, std::int64_t, std::int64_t) const { return nullptr; }

nn::Parameter& SharedParameters::get(const nn::Parameter& described) {
  for (const auto& parameter : parameters_) {
    if (parameter->name == described.name) return *parameter;
  }
  return *parameters_.emplace_back(std::make_unique<nn::Parameter>(described));
}

void SharedParameters::for_each_parameter(const nn::ParameterVisitor& visit) {
  for (const auto& parameter : parameters_) visit(*parameter);
}

}  // namespace flashgla::mixers
