#include "cli/state_size.h"

#include "cli/progress.h"
#include "flashgla/model/language_model.h"

namespace flashgla::cli {

StateSize state_size(const model::ModelConfig& config) {
  StateSize size;
  for (const mixers::StateEntry& entry : model::describe_state(config, DType::bf16)) {
    const auto bytes = static_cast<double>(entry.shape.numel()) * static_cast<double>(size_of(entry.dtype));
    (entry.growing ? size.per_token : size.constant) += bytes;
  }
  return size;
}

std::string text_of(const StateSize& size) {
  std::string text = size.constant > 0 ? format_bytes(size.constant) + ", whatever the length" : "";
  if (size.per_token > 0) {
    text += (text.empty() ? "" : "; and ") + format_bytes(size.per_token) + " a token with bf16 weights";
  }
  return text;
}

}  // namespace flashgla::cli
