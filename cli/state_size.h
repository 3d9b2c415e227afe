// What a sequence's state takes while a model writes, in words.
#pragma once

#include <string>

#include "flashgla/model/config.h"

namespace flashgla::cli {

struct StateSize {
  double constant = 0.0;   // bytes, whatever the length
  double per_token = 0.0;  // and for each token, with bf16 weights
};
StateSize state_size(const model::ModelConfig& config);
std::string text_of(const StateSize& size);

}  // namespace flashgla::cli
