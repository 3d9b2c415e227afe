// A model in a folder, in the Hugging Face layout: config.json, model.safetensors (or shards with
// model.safetensors.index.json), and the tokenizer's files beside them.
#pragma once

#include <memory>
#include <string>

#include "flashgla/model/language_model.h"

namespace flashgla::model {

struct LoadOptions {
  std::optional<DType> dtype;  // absent: as stored
  Device device;
  bool training = false;
};

// Throws Error naming file, tensor and remedy when a file is missing, truncated or corrupt, or when the config
// disagrees with the weights. Accepts both historic MLP layouts (fused [2I, D] gate_proj, gate first).
std::unique_ptr<LanguageModel> load_model(const std::string& folder, const LoadOptions& options);

// Written to temporary names and renamed; `shard_bytes` 0: one file. Tied heads are omitted.
void save_model(const LanguageModel& model, const std::string& folder, std::size_t shard_bytes = 0);

}  // namespace flashgla::model
