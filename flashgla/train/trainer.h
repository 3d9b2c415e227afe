// Trainer: a whole training run, from a configuration to a run folder with metrics and checkpoints.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "flashgla/base/context.h"
#include "flashgla/data/dataset.h"
#include "flashgla/data/loader.h"
#include "flashgla/model/language_model.h"
#include "flashgla/train/config.h"
#include "flashgla/train/metrics.h"
#include "flashgla/train/optimizer.h"
#include "flashgla/train/run_folder.h"

namespace flashgla::train {

// All memory of a run, known before its first step.
struct MemoryPlan {
  struct Row {
    std::string group;  // "parameters", "gradients", "optimizer", "state", "activations", "scratch"
    std::string label;  // what the bytes are
    std::size_t bytes;
  };
  std::vector<Row> rows;
  std::size_t total() const;
};

// The trainer never prints. All may be absent.
struct Events {
  std::function<void(const MetricsRow&)> step;  // after every update, logged or not; skipped ones too
  std::function<void(const MetricsRow&)> evaluation;
  std::function<void(const std::string& path)> checkpoint;  // saved
  std::function<void(const std::string& line)> notice;  // what the user should know, such as a checkpoint passed over
  std::function<bool()> stop_requested;                 // asked after every update
};

struct Evaluation {
  double loss = 0.0;           // nats per token
  double bits_per_byte = 0.0;  // NaN when the data's bytes are unknown
  std::int64_t targets = 0;
};

enum class Outcome : std::uint8_t { finished, interrupted };

class Trainer {
 public:
  // Opens data, builds or loads the model, plans and takes all memory. With `resume`, goes on from the newest whole
  // checkpoint of the run folder (corrupt ones are passed over with a notice; without any, the run begins).
  // Throws Error; also when the folder holds a run and `resume` is not given.
  Trainer(const TrainConfig& config, Events events, bool resume);
  ~Trainer();

  // To the last step, or until a stop is requested (after the update being made, which is then saved).
  // Throws Error when max_skipped_updates in a row were not made, or a checkpoint cannot be written.
  Outcome run();

  // One update. Returns its row (kind "train" or "skipped").
  MetricsRow step();
  // Over at most `tokens` of the validation data (0: all).
  Evaluation evaluate(std::int64_t tokens);
  // Returns the checkpoint's path.
  std::string save();
  // What a checkpoint holds beside the weights: the optimizer's tensors and the carried states.
  std::vector<model::NamedTensor> state_tensors() const;

  const TrainConfig& config() const { return config_; }  // with train_tokens and order as resolved
  const MemoryPlan& plan() const { return plan_; }
  model::LanguageModel& model() { return *model_; }
  const data::Dataset& dataset() const { return dataset_; }
  // Of this process; absent before the first.
  const std::optional<MetricsRow>& last_evaluation() const { return last_evaluation_; }
  std::int64_t steps_done() const { return steps_; }
  std::int64_t total_steps() const { return config_.total_steps(); }
  double flops_per_token() const { return flops_per_token_; }
  Context& context() { return context_; }

 private:
  void open_data();
  bool load_checkpoint();
  void restore(const std::string& path, const std::string& progress);
  void build_model(const std::string& weights);
  void plan_memory();
  // Loss summed over the targets of one micro-batch; adds its gradients.
  double forward_backward(const data::Batch& batch, std::int64_t micro);
  // The batch's sequences with as many empty ones at the end as the plan asks for.
  nn::Sequences planned_sequences(const data::Batch& batch);
  double sum_of_losses(const TensorView& losses) const;
  void evaluate_and_record();

  TrainConfig config_;
  Events events_;
  Context context_;
  RunFolder folder_;
  data::Dataset dataset_;
  std::unique_ptr<data::Loader> loader_;
  std::unique_ptr<data::Loader> evaluation_loader_;  // null without validation data
  std::unique_ptr<model::LanguageModel> model_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<MetricsWriter> metrics_;
  Arena saved_;
  data::Batch batch_;
  Tensor losses_;
  Tensor cu_seqlens_;  // order packed: i32 [most sequences + 1]
  // Carried states (order segments): one for each micro-batch, and one for evaluation.
  std::vector<model::DecodeState> states_;
  std::vector<model::DecodeState> evaluation_states_;
  MemoryPlan plan_;
  double flops_per_token_ = 0.0;

  // Progress: what trainer.json keeps.
  std::int64_t steps_ = 0;
  std::int64_t tokens_ = 0;
  std::int64_t skipped_in_a_row_ = 0;
  std::int64_t last_done_step_ = 0;
  double seconds_ = 0.0;
  double best_loss_;
  std::int64_t best_step_ = -1;
  std::optional<MetricsRow> last_evaluation_;
};

}  // namespace flashgla::train
