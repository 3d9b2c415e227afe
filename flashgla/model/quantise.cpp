#include "flashgla/model/quantise.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "flashgla/base/memory.h"
#include "flashgla/base/names.h"
#include "flashgla/ops/quantised_linear/gptq.h"
#include "flashgla/ops/quantised_linear/quantise.h"

namespace flashgla::model {

std::optional<Format> QuantisationPreset::of(nn::Quantisation quantisation) const {
  switch (quantisation) {
    case nn::Quantisation::none:
      return std::nullopt;
    case nn::Quantisation::mlp:
      return mlp;
    case nn::Quantisation::mixer:
      return mixer;
    case nn::Quantisation::sensitive:
      return sensitive;
  }
  return std::nullopt;
}

const std::vector<QuantisationPreset>& quantisation_presets() {
  static const std::vector<QuantisationPreset> presets = {{"q8", Format::q8, Format::q8, Format::q8},
                                                          {"q4", Format::q4, Format::q4, Format::q8},
                                                          {"q4-safe", Format::q4, Format::q8, Format::q8},
                                                          {"q4-all", Format::q4, Format::q4, Format::q4}};
  return presets;
}

const QuantisationPreset& find_quantisation_preset(const std::string& name) {
  std::string known;
  for (const QuantisationPreset& preset : quantisation_presets()) {
    if (preset.name == name) return preset;
    known += (known.empty() ? "" : ", ") + std::string(preset.name);
  }
  throw Error("quantise: unknown preset '" + name + "'; known: " + known);
}

namespace {

void require_finite(const nn::Parameter& parameter, const TensorView& values) {
  const TensorView flat = values.reshape(Shape({values.numel()}));
  for (std::int64_t i = 0; i < flat.numel(); ++i) {
    const double value = load_element(flat, std::array{i});
    if (!std::isfinite(value)) {
      throw Error("quantise: " + parameter.name + " holds " + std::to_string(value) + " at element " +
                  std::to_string(i) + "; the model's weights are damaged");
    }
  }
}

// Names of the matrices that a preset packs, without their layers' names.
std::string names_of_matrices(const LanguageModel& model, const QuantisationPreset& preset) {
  std::vector<std::string> names;
  for (const nn::Parameter* parameter : model.parameters().parameters()) {
    if (!preset.of(parameter->quantisation)) continue;
    const std::size_t end = parameter->name.rfind(".weight"), begin = parameter->name.rfind('.', end - 1) + 1;
    const std::string name = parameter->name.substr(begin, end - begin);
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  std::string all;
  for (const std::string& name : names) all += (all.empty() ? "" : ", ") + name;
  return all;
}

}  // namespace

std::unique_ptr<LanguageModel> quantise(const LanguageModel& model, const QuantiseOptions& options) {
  if (model.parameters().packed()) {
    throw Error(
        "quantise: the model's weights are of 8 or 4 bits already; quantise the one in floats that it was made of");
  }
  if (model.device() != Device::cpu()) throw Error("quantise", "model", "is on " + name_of(model.device()), "cpu");
  const auto place = [&](const nn::Parameter& parameter) {
    const bool wanted = parameter.name.find(options.only) != std::string::npos;
    return nn::Placement{wanted ? options.preset.of(parameter.quantisation) : std::nullopt, nullptr};
  };
  auto result = std::make_unique<LanguageModel>(model.config(), model.dtype(), Device::cpu(), false, place);
  if (!result->parameters().packed()) {
    const std::string known = names_of_matrices(model, options.preset);
    throw Error("quantise: no matrix with '" + options.only + "' in its name becomes " + options.preset.name +
                (known.empty() ? "; this model has none that do" : "; those that do: " + known));
  }
  const auto& from = model.parameters().parameters();
  const auto& to = result->parameters().parameters();
  Context context;
  std::int64_t done = 0;
  for (std::size_t i = 0; i < from.size(); ++i) {
    const TensorView &value = from[i]->value, &packed = to[i]->value;
    if (ops::quantised_linear::is_packed(packed)) {
      const ArenaScope scope(context.scratch());
      const TensorView floats = context.scratch().tensor(value.shape, DType::f32);
      copy(value, floats);
      const Calibration* const known = options.calibration;
      const TensorView squares = known ? known->squares_of(*from[i]) : TensorView();
      const TensorView products = known ? known->products_of(*from[i]) : TensorView();
      try {
        ops::quantised_linear::quantise(context, floats, squares, packed);
        if (options.gptq && products && ops::quantised_linear::format_of(packed) == Format::q4) {
          ops::quantised_linear::compensate(context, floats, products, packed);
        }
      } catch (const Error& error) {
        throw Error("quantise: " + from[i]->name + " " + error.what());
      }
    } else {
      require_finite(*from[i], value);
      copy_memory(packed.data, Device::cpu(), value.data, Device::cpu(), value.bytes());
    }
    done += value.numel();
    if (options.monitor) options.monitor(done, model.parameters().count());
  }
  return result;
}

std::unique_ptr<LanguageModel> copied_to(const LanguageModel& model, Device device) {
  std::map<std::string, Format> formats;
  for (const nn::Parameter* parameter : model.parameters().parameters()) {
    if (ops::quantised_linear::is_packed(parameter->value)) {
      formats[parameter->name] = ops::quantised_linear::format_of(parameter->value);
    }
  }
  const auto place = [&](const nn::Parameter& parameter) {
    const auto found = formats.find(parameter.name);
    return nn::Placement{found == formats.end() ? std::nullopt : std::optional(found->second), nullptr};
  };
  auto result = std::make_unique<LanguageModel>(model.config(), model.dtype(), device, false, place);
  const auto& from = model.parameters().parameters();
  const auto& to = result->parameters().parameters();
  for (std::size_t i = 0; i < from.size(); ++i) {
    copy_memory(to[i]->value.data, device, from[i]->value.data, model.device(), from[i]->value.bytes());
  }
  return result;
}

std::unique_ptr<LanguageModel> dequantise(const LanguageModel& model, DType dtype, Device device, int threads) {
  auto result =
      std::make_unique<LanguageModel>(model.config(), dtype, device, false, nn::Placements{}, nullptr, threads);
  const auto& from = model.parameters().parameters();
  const auto& to = result->parameters().parameters();
  Context context;
  for (std::size_t i = 0; i < from.size(); ++i) {
    const TensorView& value = from[i]->value;
    const Tensor host = Tensor::empty(from[i]->shape, dtype);
    if (ops::quantised_linear::is_packed(value)) {
      ops::quantised_linear::decode(context, value, 0, host);
    } else {
      copy(value, host);
    }
    copy_memory(to[i]->value.data, device, host->data, Device::cpu(), host->bytes());
  }
  return result;
}

}  // namespace flashgla::model
