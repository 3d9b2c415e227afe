// Planning a run: the form of its step, the memory that it takes, the algorithms of its matrix products.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <string>

#include "flashgla/base/file.h"
#include "flashgla/base/memory.h"
#include "flashgla/base/names.h"
#include "flashgla/ops/matmul/plans.h"
#include "flashgla/ops/softmax_attention/library.h"
#include "flashgla/train/trainer.h"

namespace flashgla::train {

namespace {

// What a device says when asked for more than there is, and what can be done.
struct Remedies {
  bool model_alone = false;  // is too large: no form of the step helps
  bool resumed = false;      // what decides the run's data and state is settled
};
[[noreturn]] void refuse_plan(const TrainConfig& config, const MemoryPlan& least, std::size_t limit, Remedies are) {
  const auto size = [](std::size_t bytes) {
    const bool large = bytes >= std::size_t{1} << 30;
    char text[32];
    std::snprintf(text, sizeof text, "%.2f %s", static_cast<double>(bytes) / (large ? 0x1p30 : 0x1p20),
                  large ? "GiB" : "MiB");
    return std::string(text);
  };
  std::string remedies;
  const bool settled = are.resumed && (config.order == "packed" || config.order == "segments");
  if (!are.model_alone && config.micro_batch != 0 && !settled) {
    remedies += are.resumed ? "a smaller micro_batch, " : "micro_batch 0, ";
  }
  if (!are.model_alone && config.recompute != "automatic") remedies += "recompute automatic, ";
  if (!are.resumed && config.optimizer_state != "half") remedies += "optimizer_state half, ";
  if (!are.resumed && !are.model_alone) remedies += "a smaller batch_tokens or sequence_length, ";
  if (are.resumed && !config.memory_limit.empty()) remedies += "a higher memory_limit, ";
  remedies += are.resumed ? "a device with more memory" : "a smaller model";
  throw Error("training: " + size(least.total()) + " of memory are needed on " + config.device + ", and " +
              size(limit) +
              (!config.memory_limit.empty() ? " are allowed"
               : config.device == "cpu"     ? " are there"
                                            : " are free") +
              "; remedies: " + remedies);
}

// Kept free of a device's memory when no limit is given: what libraries, kernels and recorded graphs take.
constexpr std::size_t kReserve = std::size_t{1} << 30;

}  // namespace

data::LoaderConfig Trainer::loader_config() const {
  data::LoaderConfig loader;
  loader.mode = data::loader_mode_from_name(config_.order);
  // Rows of a batch are independent of how many of them go through the model at a time; packed documents are not cut
  // into micro-batches, each micro-batch is packed.
  const bool packed = loader.mode == data::LoaderMode::packed;
  loader.batch = packed ? config_.sequences_per_micro_batch() : config_.sequences_per_batch();
  loader.length = config_.sequence_length;
  loader.segments = config_.segments;
  loader.seed = static_cast<std::uint64_t>(config_.seed);
  return loader;
}

void Trainer::open_feeds(const StepForm& form) {
  config_.micro_batch = form.micro_batch;
  config_.recompute = nn::name_of(form.recompute);
  const std::int64_t rows = config_.sequences_per_micro_batch();
  data::LoaderConfig loader = loader_config();
  loader.vocabulary = model_->config().vocab_size;
  loader_ = std::make_unique<data::Loader>(dataset_.train, loader);
  feed_ = std::make_unique<Feed>(context_, *loader_, rows);
  if (dataset_.validation.file && dataset_.validation.size() > 1) {
    loader.shuffle = false;
    loader.single_pass = true;
    evaluation_loader_ = std::make_unique<data::Loader>(dataset_.validation, loader);
    evaluation_feed_ = std::make_unique<Feed>(context_, *evaluation_loader_, rows);
  }
  if (config_.train_tokens == 0) {
    config_.train_tokens = std::max(config_.batch_tokens, loader_->tokens_per_epoch());
  }
  config_.validate();
  states_.clear();
  evaluation_states_.clear();
  if (loader_->config().mode == data::LoaderMode::segments) {
    for (std::int64_t i = 0; i < config_.accumulation(); ++i) {
      states_.push_back(model_->make_state(rows));
      if (evaluation_loader_) evaluation_states_.push_back(model_->make_state(rows));
    }
    if (states_.front().grows()) {
      throw Error(
          "training: order segments carries states of constant size, but this model has layers whose state grows "
          "with the length; use another order, or softmax attention with a window_size");
    }
    if (model_->config().learned_positions && (config_.segments == 0 || config_.segments * config_.sequence_length >
                                                                            model_->config().max_position_embeddings)) {
      throw Error("training", "segments", "are of more tokens than the model has learned positions",
                  "segments * sequence_length to be at most max_position_embeddings (" +
                      std::to_string(model_->config().max_position_embeddings) + "), or another order");
    }
  }
}

MemoryPlan Trainer::model_memory(const model::ModelConfig& model) const {
  return {rows_of_model(model::parameter_count(model), dtype_from_name(config_.dtype),
                        optimizer_state_from_name(config_.optimizer_state))};
}

std::optional<std::size_t> Trainer::memory_limit(std::size_t held) const {
  const std::size_t asked = config_.memory_limit_bytes();
  if (asked > 0) return asked;
  std::optional<std::size_t> limit = free_memory(context_.device());
  if (limit) limit = held + (*limit > kReserve ? *limit - kReserve : 0);
  return limit;
}

void Trainer::require_memory_for(const model::ModelConfig& model, bool resumed) const {
  const MemoryPlan plan = model_memory(model);
  const std::size_t most = memory_limit(0).value_or(host_memory());
  if (plan.total() > most) refuse_plan(config_, plan, most, {.model_alone = true, .resumed = resumed});
}

MemoryPlan Trainer::plan_step(const StepForm& form) {
  open_feeds(form);
  const std::int64_t scored = loader_->labels() > 0 ? loader_->labels() : config_.sequence_length;
  losses_ = Tensor::empty({config_.sequences_per_micro_batch() * scored}, DType::f32, context_.device());
  if (loader_->labels() > 0) hits_ = Tensor::empty(losses_->shape, DType::f32, context_.device());
  context_.scratch().begin_planning();
  saved_.begin_planning();
  for (const Bucket& bucket : feed_->all_buckets()) {
    for (std::int64_t micro = 0; micro < std::min<std::int64_t>(config_.accumulation(), 2); ++micro) {
      do_micro_batch({.first = micro == 0, .bucket = bucket});
    }
  }
  if (evaluation_feed_) {
    for (const Bucket& bucket : evaluation_feed_->all_buckets()) do_evaluation({.bucket = bucket});
  }
  do_update();

  MemoryPlan plan = model_memory(model_->config());
  const auto row = [&](const char* group, const std::string& label, std::size_t bytes) {
    if (bytes > 0) plan.rows.push_back({group, label, bytes});
  };
  std::size_t data = feed_->device_bytes() + losses_->bytes();
  if (evaluation_feed_) data += evaluation_feed_->device_bytes();
  row("data", "tokens, losses", data);
  std::size_t carried = 0;
  for (const model::DecodeState& state : states_) carried += state.bytes();
  for (const model::DecodeState& state : evaluation_states_) carried += state.bytes();
  row("states", "carried from segment to segment", carried);
  for (const auto& [label, bytes] : saved_.plan()) row("activations", label, bytes);
  for (const auto& [label, bytes] : context_.scratch().plan()) row("scratch", label, bytes);
  return plan;
}

void Trainer::plan_memory(bool resumed) {
  record_ = Tensor::zeros({3}, DType::f64, context_.device());
  pinned_ = allocate_pinned_memory((kInFlight + 1) * sizeof(Record));
  for (std::size_t i = 0; i <= kInFlight; ++i) marks_.push_back(std::make_unique<Marks>(context_.queue()));
  const std::optional<std::size_t> limit = memory_limit(model_memory(model_->config()).total());
  const std::size_t most = limit.value_or(host_memory());
  bool fits = false;
  std::optional<MemoryPlan> least;
  const TrainConfig asked = config_;  // plan_step writes the form into it
  for (const StepForm& form : step_forms(asked)) {
    plan_ = plan_step(form);
    fits = plan_.total() <= most;
    if (fits) break;
    if (!least || plan_.total() < least->total()) least = plan_;
  }
  if (!fits) refuse_plan(asked, *least, most, {.model_alone = false, .resumed = resumed});

  std::vector<TensorView> copied = optimizer_->blocks();
  copied.push_back(model_->parameters().all_values());
  for (const model::DecodeState& state : states_) {
    copied.push_back(state.constant());
    copied.push_back(state.positions());
  }
  const std::size_t copy = Snapshot::bytes_for(copied);
  if (limit && plan_.total() + copy <= *limit) {
    snapshot_ = std::make_unique<Snapshot>(copied, context_.device());
    plan_.rows.push_back({"checkpoints", "a copy, written while training goes on", copy});
  }
  context_.scratch().commit_plan();
  saved_.commit_plan();
  transfer_ = std::make_unique<Transfer>(context_.device());
  context_.queue().synchronize();
}

void Trainer::plan_products(const std::string& checkpoint) {
  namespace matmul = ops::matmul;
  namespace softmax_attention = ops::softmax_attention;
  const auto tell = [&](const matmul::Notices& notices) {
    for (const std::string& notice : notices) {
      if (events_.notice) events_.notice(notice);
    }
  };
  const std::string cache = matmul::plan_cache_folder();
  tell(matmul::load_plan_cache(context_, cache));
  const std::string file = checkpoint + "/" + kProductsFile;
  if (!checkpoint.empty()) {
    const bool of_gpu = std::filesystem::exists(file);
    if (of_gpu == (context_.device() == Device::cpu())) {
      tell({std::string("the checkpoint is of a run on ") + (of_gpu ? "a GPU" : "the CPU") + ", and here is " +
            device_name(context_.device()) + ": results may differ in their last bits"});
    } else if (of_gpu) {
      tell(matmul::import_plans(context_, read_file(file)));
      const std::string attention = checkpoint + "/" + kAttentionFile;
      const std::string notice =
          softmax_attention::notice_of_change(std::filesystem::exists(attention) ? read_file(attention) : std::string(),
                                              softmax_attention::library_of(context_));
      if (!notice.empty()) tell({notice});
    }
  }
  const ArenaScope scope(saved_);
  tell(matmul::time_plans(context_, saved_.tensor({static_cast<std::int64_t>(saved_.peak())}, DType::u8)));
  tell(matmul::save_plan_cache(context_, cache));
}

std::vector<std::pair<std::string, std::string>> Trainer::records_of_libraries() {
  std::vector<std::pair<std::string, std::string>> records = {
      {kProductsFile, ops::matmul::export_plans(context_)},
      {kAttentionFile, ops::softmax_attention::library_of(context_)}};
  std::erase_if(records, [](const auto& record) { return record.second.empty(); });
  return records;
}

}  // namespace flashgla::train
