// Models of noise for benches.
#pragma once

#include <memory>
#include <string>

#include "flashgla/model/language_model.h"

namespace flashgla::bench {

// A model for inference with initial weights. quantised: "", or the preset (model/quantise.h) in which its matrices are
// packed; those then hold noise, since finding the best codes for real numbers would take the bench's time.
std::unique_ptr<model::LanguageModel> noise_model(const std::string& preset, DType dtype, Device device,
                                                  const std::string& quantised, int threads = 0);

}  // namespace flashgla::bench
