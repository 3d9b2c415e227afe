// TrainConfig: everything that decides a training run. One list of fields, from which the JSON file, the command
// line's flags, the printed summary and validation's names are derived.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "flashgla/base/dtype.h"
#include "flashgla/train/schedule.h"

namespace flashgla::train {

struct TrainConfig {
  // What.
  std::string model = "gla-tiny";
  std::string initial_weights;
  std::string data;
  std::string out;
  // How much.
  std::int64_t train_tokens = 0;
  std::int64_t batch_tokens = 8192;
  std::int64_t sequence_length = 256;
  std::int64_t micro_batch = 0;
  std::string order = "automatic";
  std::int64_t segments = 1;
  // The optimizer.
  double learning_rate = 3e-4;
  double initial_learning_rate = 3e-5;
  double final_learning_rate = 3e-5;
  std::int64_t warmup_tokens = -1;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.01;
  double clip_norm = 1.0;
  double dropout = 0.0;
  double embedding_dropout = -1.0;
  double attention_dropout = -1.0;
  std::string optimizer_state = "full";
  // Where and in what precision. "automatic" is settled by the trainer, by the device and its memory.
  std::string device = "auto";
  std::string dtype = "automatic";
  std::int64_t threads = 0;
  std::string memory_limit;
  std::string recompute = "automatic";
  std::string graphs = "on";
  std::int64_t seed = 1;
  // What is written, and when.
  std::int64_t log_every = 1;
  std::int64_t evaluate_every = 200;
  std::int64_t evaluation_tokens = 262144;
  std::int64_t checkpoint_every = 500;
  std::int64_t keep_checkpoints = 2;
  std::int64_t max_skipped_updates = 10;
  // When to stop before the last step.
  double stop_accuracy = 0.0;
  std::int64_t patience = 0;

  // Throws Error that names the field, its value and what it must be.
  void validate() const;

  // Derived, with the train_tokens that a run resolved (one pass over the data when the field is 0).
  std::int64_t sequences_per_batch() const { return batch_tokens / sequence_length; }
  std::int64_t sequences_per_micro_batch() const { return micro_batch > 0 ? micro_batch : sequences_per_batch(); }
  std::int64_t accumulation() const { return sequences_per_batch() / sequences_per_micro_batch(); }
  std::int64_t total_steps() const { return (train_tokens + batch_tokens - 1) / batch_tokens; }
  double resolved_embedding_dropout() const { return embedding_dropout < 0.0 ? dropout : embedding_dropout; }
  double resolved_attention_dropout() const { return attention_dropout < 0.0 ? dropout : attention_dropout; }
  Schedule schedule() const;
  Device resolved_device() const;          // "auto": the first CUDA device, or the CPU where there is none
  std::size_t memory_limit_bytes() const;  // 0: none given
};

struct Field {
  const char* name;  // "batch_tokens": the key in the file; the flag is --batch-tokens
  const char* group;
  const char* help;
  std::variant<std::string*, std::int64_t*, double*> value;
};

std::string value_text(const Field& field);

// Pointers into `config`, in the order in which they are written and shown.
std::vector<Field> fields(TrainConfig& config);

// Sets one field from text; counts may end in K, M, B or T ("15B"). Throws Error that names the field.
void set_field(TrainConfig& config, const std::string& name, const std::string& text);

// Fields that the file does not name keep their value in `config`. "model" may be a preset's name, a path, or an object
// with the model's own configuration. Throws Error that names the file and the field.
void load_config(TrainConfig& config, const std::string& path);
void parse_config(TrainConfig& config, const std::string& json, const std::string& source);
std::string to_json(const TrainConfig& config);

}  // namespace flashgla::train
