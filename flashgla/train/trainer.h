// Trainer: a whole training run, from a configuration to a run folder with metrics and checkpoints.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "flashgla/base/context.h"
#include "flashgla/data/dataset.h"
#include "flashgla/data/loader.h"
#include "flashgla/model/language_model.h"
#include "flashgla/train/config.h"
#include "flashgla/train/feed.h"
#include "flashgla/train/memory_plan.h"
#include "flashgla/train/metrics.h"
#include "flashgla/train/optimizer.h"
#include "flashgla/train/run_folder.h"
#include "flashgla/train/snapshot.h"
#include "flashgla/train/step_graphs.h"

namespace flashgla::train {

// The trainer never prints. All may be absent.
struct Events {
  // After every update, logged or not; skipped ones too. Where the device works on while the host does, one update
  // late.
  std::function<void(const MetricsRow&)> step;
  std::function<void(const MetricsRow&)> evaluation;
  std::function<void(const std::string& path)> checkpoint;  // saved
  std::function<void(const std::string& line)> notice;  // what the user should know, such as a checkpoint passed over
  std::function<bool()> stop_requested;                 // asked after every update and every batch of an evaluation
};

struct Evaluation {
  double loss = 0.0;           // nats per token
  double bits_per_byte = 0.0;  // NaN when the data's bytes are unknown
  double accuracy = 0.0;       // of a task; NaN else
  std::int64_t targets = 0;
};

enum class Outcome : std::uint8_t { finished, interrupted };

class Trainer {
 public:
  // Opens data, builds or loads the model, chooses the step's form, plans and takes all memory. With `resume`, goes on
  // from the newest whole checkpoint of the run folder (corrupt ones are passed over with a notice; without any, the
  // run begins). Throws Error; also when the folder holds a run and `resume` is not given.
  // plan_only: for plan() and config() alone; no weights are drawn.
  Trainer(const TrainConfig& config, Events events, bool resume, bool plan_only = false);
  ~Trainer();

  // Takes the run's folder: writes train.json and opens metrics.jsonl. Nothing is written before. run and save do it
  // where nobody has. Throws Error when another process trains there.
  void begin();
  // To the last step, or until validation says that it is enough (stop_accuracy, patience), or a stop is requested
  // (after the update being made, which is then saved; an evaluation is broken off, and made first when the run goes
  // on).
  // Throws Error when max_skipped_updates in a row were not made, or a checkpoint cannot be written.
  Outcome run();

  // One update. Returns its row (kind "train" or "skipped").
  MetricsRow step();
  // Over the first `tokens` of the validation data (0: all), whatever the micro-batch is. Of a task whole sequences, at
  // least one; with order segments they are the first of as many streams as a batch has sequences.
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
  Context& context() { return context_; }
  Arena& activations() { return saved_; }

 private:
  // One update that was queued and whose row has not been made.
  struct Pending {
    MetricsRow row;
    std::chrono::steady_clock::time_point start;
    std::int64_t targets = 0;
    std::size_t slot = 0;  // of its record
    bool follows = false;  // the device goes on from the last update with it
  };
  // Marks in the device's order, from which an update's time is read.
  struct Marks {
    explicit Marks(const Queue& queue) : begin(queue, true), end(queue, true) {}
    Event begin, end;
  };
  // What the device says of an update, in pinned memory; kInFlight of them.
  struct Record {
    double loss;                    // summed over targets
    std::int64_t first_non_finite;  // element of the gradients; -1: none
  };
  static constexpr std::size_t kInFlight = 2;

  void open_data();
  void build_model(const std::string& weights, bool resumed, bool plan_only);
  // Chooses the form of the step, plans and takes all memory.
  void plan_memory(bool resumed);
  // What a model of this shape takes before any step; what the run may take, of which it holds so many bytes (nothing:
  // all that the machine has); throws Error where that is not enough.
  MemoryPlan model_memory(const model::ModelConfig& model) const;
  std::optional<std::size_t> memory_limit(std::size_t held) const;
  void require_memory_for(const model::ModelConfig& model, bool resumed) const;
  // Which algorithms matrix products use: a checkpoint's, so that a resumed run gives the same bits; else those that
  // were timed before on such a device; else timed now.
  void plan_products(const std::string& checkpoint);
  // Names and contents of the files above; none on the CPU.
  std::vector<std::pair<std::string, std::string>> records_of_libraries();
  void open_feeds(const StepForm& form);
  MemoryPlan plan_step(const StepForm& form);
  // The newest whole checkpoint and its progress; nothing when there is none at all.
  struct Found {
    std::string path, progress;
  };
  std::optional<Found> find_checkpoint() const;
  // Throws Error naming the field where the configuration asks for another model, other data or what else a run cannot
  // change; takes the run's micro_batch where none is given.
  void require_same_run(const Found& found);
  // The same of a model that is stored, `where`.
  void require_same_model(const model::ModelConfig& stored, const std::string& where) const;
  data::LoaderConfig loader_config() const;
  void restore(const Found& found);

  void queue_step();
  // The work of a piece of a step, a function of its key alone.
  void do_micro_batch(const StepGraphs::Key& key);
  void do_evaluation(const StepGraphs::Key& key);
  void do_update();
  TensorView loss() const;              // f64 [1] of record_
  TensorView first_non_finite() const;  // i64 [1] of it
  TensorView hits() const;              // f64 [1] behind it, of an evaluation
  // Waits for the oldest update that was queued.
  MetricsRow next_row();
  // Seconds that an update took: on the device, where it has a clock.
  double seconds_of(const Pending& pending) const;
  // Makes, writes and announces rows until at most `left` updates have none; those that are done already in any case.
  void report(std::size_t left);
  // Nothing where a stop was requested meanwhile; `stop` may be absent.
  std::optional<Evaluation> evaluate_unless(const std::function<bool()>& stop, std::int64_t tokens);
  // False where a stop was requested meanwhile: nothing is recorded then, and the evaluation is due.
  bool evaluate_and_record();
  // Of the checkpoint of the step made last, which was saved before this evaluation of it.
  void mark_if_best();
  // Why validation says that the run may end; empty: it does not.
  std::string enough() const;

  // A checkpoint in two parts: what must be done between two steps, and what a thread does.
  void start_saving();
  std::string finish_saving();  // waits; throws what went wrong; empty when nothing was being saved
  void announce_saved();        // the same, when it is done already

  TrainConfig config_;
  std::string device_asked_for_;
  std::int64_t micro_batch_asked_for_;
  Events events_;
  Context context_;
  RunFolder folder_;
  data::Dataset dataset_;
  std::unique_ptr<data::Loader> loader_;
  std::unique_ptr<data::Loader> evaluation_loader_;  // null without validation data
  std::unique_ptr<Feed> feed_;
  std::unique_ptr<Feed> evaluation_feed_;
  std::unique_ptr<model::LanguageModel> model_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<MetricsWriter> metrics_;
  Arena saved_;
  StepGraphs graphs_;
  Tensor losses_;  // f32, of a micro-batch
  Tensor hits_;    // f32, the same of a task's evaluation
  Tensor record_;  // a Record on the device and an evaluation's hits, as f64 [3]
  std::shared_ptr<void> pinned_;
  std::deque<Pending> pending_;
  std::vector<std::unique_ptr<Marks>> marks_;  // kInFlight + 1: the last row's are still needed
  std::size_t queued_ = 0;
  bool interrupted_ = true;  // something else was queued since the last update
  std::chrono::steady_clock::time_point last_row_;
  // Carried states (order segments): one for each micro-batch, and as many for evaluation.
  std::vector<model::DecodeState> states_;
  std::vector<model::DecodeState> evaluation_states_;
  MemoryPlan plan_;
  double flops_per_token_ = 0.0;

  std::unique_ptr<Snapshot> snapshot_;  // null: training waits while a checkpoint is written
  std::unique_ptr<Transfer> transfer_;
  std::future<std::string> saving_;
  std::int64_t saving_step_ = 0;
  std::optional<std::pair<std::int64_t, double>> saving_best_;  // step and loss, when it is the best one so far

  // Progress: what trainer.json keeps.
  std::int64_t steps_ = 0;
  std::optional<std::int64_t> restored_step_;  // of the checkpoint that the run goes on from
  std::int64_t tokens_ = 0;
  std::int64_t skipped_in_a_row_ = 0;
  std::int64_t last_done_step_ = 0;
  double seconds_ = 0.0;
  double best_loss_;
  std::int64_t best_step_ = -1;
  std::optional<MetricsRow> last_evaluation_;
  bool evaluation_due_ = false;  // of the step made last: the run was stopped before it
  // What decides whether the run ends early.
  struct Progress {
    double accuracy = 0.0;  // of the last evaluation of a task
    double lowest_loss = std::numeric_limits<double>::infinity();
    double highest_accuracy = 0.0;
    std::int64_t since_best = 0;  // evaluations that were better in neither
  } progress_;
};

}  // namespace flashgla::train
