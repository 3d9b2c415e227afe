// A model in a folder, in the Hugging Face layout: config.json, model.safetensors (or shards with
// model.safetensors.index.json), and the tokenizer's files beside them. And the state of a generation in a file.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "flashgla/model/language_model.h"
#include "flashgla/model/safetensors.h"

namespace flashgla::model {

enum class MlpLayout : std::uint8_t {
  current,  // mlp.gate_proj and mlp.up_proj, [I, D] each
  fused,    // before 2025-02: mlp.gate_proj [2I, D], gate first
};

struct LoadOptions {
  // Absent: as stored (f16 becomes f32; on a GPU what lies beside weights of 8 or 4 bits bf16). Weights of 8 or 4 bits
  // become floats of this dtype.
  std::optional<DType> dtype;
  Device device;
  bool training = false;
  int threads = 0;  // of the decoding steps that the weights' pages are placed for on the CPU; 0: a Context's
  // Matrices stay in the mapped file, which nobody may change meanwhile: for one file on the CPU, with its tensors in
  // the model's order (as save_model writes them) and in their own dtype.
  bool map = false;
};

// Throws Error naming file, tensor and remedy when a file is missing, truncated or corrupt, or when the config
// disagrees with the weights. Accepts both MLP layouts, sharded files, and every layout of the model's mixer
// (mixers::Layout). Training refuses weights of 8 and 4 bits.
std::unique_ptr<LanguageModel> load_model(const std::string& folder, const LoadOptions& options = {});

struct SaveOptions {
  std::size_t shard_bytes = 0;  // largest size of a shard's data; 0: one file
  MlpLayout mlp_layout = MlpLayout::current;
  // Where the bytes of a parameter's value are read: in a copy of it. Absent: its own.
  std::function<TensorView(const TensorView& value)> copy_of;
  Transfer* transfer = nullptr;  // as in write_safetensors
  std::string layout{};          // mixers::Layout::name; "": the one that the model's config names
  Metadata metadata{};           // of the weights' files
};

// A layout that stores other weights than ours (mixers::Layout::convert) is written only where options.layout names it,
// and throws Error where it has no place for what the model computes; else it becomes the mixer's first.
// Everything is written to temporary names first and renamed when all of it is on the disk; a failure leaves what was
// there before. Tied heads are omitted.
void save_model(const LanguageModel& model, const std::string& folder, const SaveOptions& options = {});

// The files that hold a folder's weights: paths, opened and checked, each tensor in one of them only.
struct Weights {
  std::vector<SafetensorsReader> files;
  bool sharded = false;

  const StoredTensor* find(std::string_view name) const;  // null: in none
};
Weights open_weights(const std::string& folder);

// Hash of the config and all weights, in hexadecimal.
std::string fingerprint(const LanguageModel& model);

// The same of a folder's files, without loading a model: of config.json and of the checksums of the weights, which are
// read only where a file states none. Other for the same weights in another dtype or other shards.
std::string stored_fingerprint(const std::string& folder);

// The state of a generation, so that a long prompt is paid once, and what the caller keeps `beside` it (filled by
// load_state). load_state throws Error when the file belongs to another model or another dtype of its weights.
void save_state(const LanguageModel& model, const DecodeState& state, const std::string& path,
                const std::vector<NamedTensor>& beside = {});
DecodeState load_state(const LanguageModel& model, const std::string& path,
                       const std::vector<NamedTensor>& beside = {});

}  // namespace flashgla::model
