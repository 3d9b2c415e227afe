// The folder of a run:
//
//     train.json               the configuration, as resolved but for device and micro_batch, which are as given
//     train.lock               empty: held by the process that trains here
//     metrics.jsonl
//     products.txt             on a GPU: the algorithms that its matrix products use; also in each checkpoint
//     attention.txt            likewise: by which library its softmax attention is computed; absent: by none
//     checkpoints/step-00000500/   config.json, model.safetensors, the tokenizer's file: a model folder;
//                              optimizer.safetensors; trainer.json: progress, and the size and checksum of every file
//     checkpoints/latest       text: the name of the newest checkpoint
//     checkpoints/best         text: the name of the one with the lowest validation loss
//     checkpoints/step-00000500.damaged/   one that a resumed run passed over; never read, nor removed
//
// A checkpoint is written to a temporary folder and renamed when all of it is on the disk.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "flashgla/base/file.h"

namespace flashgla::train {

struct CheckpointInfo {
  std::int64_t step = 0;
  std::string path;
};

constexpr const char* kConfigFile = "train.json";
constexpr const char* kMetricsFile = "metrics.jsonl";
constexpr const char* kProductsFile = "products.txt";
constexpr const char* kAttentionFile = "attention.txt";

class RunFolder {
 public:
  explicit RunFolder(std::string path) : path_(std::move(path)) {}

  const std::string& path() const { return path_; }
  std::string config_file() const { return path_ + "/" + kConfigFile; }
  std::string metrics_file() const { return path_ + "/" + kMetricsFile; }

  // Makes the folder, and keeps other processes from doing so while this lives; removes what an interrupted save left
  // behind, and nothing that it did not make. Throws Error where another process trains here.
  void create();

  // By step, the newest first.
  std::vector<CheckpointInfo> checkpoints() const;

  // Calls `write` with a temporary folder to fill, adds `progress` (a JSON object) and the checksums as trainer.json,
  // and publishes the folder as the checkpoint of `step`, the latest. When anything fails the temporary folder is
  // removed and the earlier checkpoints are as they were. Returns the path.
  std::string save(std::int64_t step, const std::function<void(const std::string& folder)>& write,
                   const std::string& progress) const;

  // What `latest` and `best` name.
  void mark_latest(std::int64_t step) const;
  void mark_best(std::int64_t step) const;
  // Of a run that goes on from the checkpoint of `step`: takes those of later steps, passed over as damaged, out of the
  // run as step-00000500.damaged, and the name of a best one that is among them. Returns the folders' new paths.
  std::vector<std::string> set_aside_after(std::int64_t step) const;
  // Removes checkpoints up to the step `newest` but for the `keep` last of them and the best.
  void prune(std::int64_t keep, std::int64_t newest) const;

 private:
  std::string path_;
  std::unique_ptr<FileLock> lock_;
};

// Reads trainer.json of a checkpoint, verifies it and the size and checksum of each file that it names, and returns the
// progress that save was given. Throws Error that names the file that is missing, truncated or changed.
std::string verify_checkpoint(const std::string& path);

// What a user names a model by: a model folder as it is; a run folder: its latest checkpoint, or `which` ("best",
// "latest", "step-00000500"). Throws Error that says what was looked for.
std::string find_model_folder(const std::string& path, const std::string& which = "latest");

}  // namespace flashgla::train
