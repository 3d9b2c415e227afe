// A model's weights in 8 or 4 bits (ops/quantised_linear), and back.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "flashgla/model/calibration.h"
#include "flashgla/model/language_model.h"

namespace flashgla::model {

using ops::quantised_linear::Format;

// What becomes of each class of parameters (nn::Quantisation).
struct QuantisationPreset {
  const char* name;
  std::optional<Format> mlp, mixer, sensitive;

  std::optional<Format> of(nn::Quantisation quantisation) const;
};
const std::vector<QuantisationPreset>& quantisation_presets();
const QuantisationPreset& find_quantisation_preset(const std::string& name);  // throws Error that lists them

struct QuantiseOptions {
  QuantisationPreset preset;
  // Matrices whose name does not contain this stay as they are.
  std::string only;
  // Of the inputs of its matrices, whose errors are weighted accordingly; null: all alike.
  const Calibration* calibration = nullptr;
  bool gptq = false;  // columns of q4 make up for the errors of those before them (gptq.h); needs products
  // After each matrix: elements done, and of how many.
  std::function<void(std::int64_t done, std::int64_t total)> monitor;
};

// On the CPU, for inference there or, copied, on a GPU. Throws Error that names the parameter when a weight, whether it
// is quantised or not, is not finite or too large, and when the model has been quantised already.
std::unique_ptr<LanguageModel> quantise(const LanguageModel& model, const QuantiseOptions& options);

// The same model with all weights in floats. threads: as LanguageModel.
std::unique_ptr<LanguageModel> dequantise(const LanguageModel& model, DType dtype, Device device, int threads = 0);

// A quantised model as it is, on a device, for inference.
std::unique_ptr<LanguageModel> copied_to(const LanguageModel& model, Device device);

}  // namespace flashgla::model
