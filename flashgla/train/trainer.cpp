#include "flashgla/train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <numbers>

#include "flashgla/base/file.h"
#include "flashgla/base/names.h"
#include "flashgla/model/checkpoint.h"
#include "flashgla/model/config.h"
#include "flashgla/model/cost.h"

namespace flashgla::train {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
// With fewer documents than this, packing whole ones would make batches of one source.
constexpr std::int64_t kFewDocuments = 16;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

double bits_per_byte(double nats_per_token, double bytes_per_target) {
  return bytes_per_target > 0.0 ? nats_per_token / std::numbers::ln2 / bytes_per_target : kNaN;
}

// The model that the configuration asks for. One that does not say its vocabulary's size takes the data's.
model::ModelConfig resolve_model(const TrainConfig& config, const data::Dataset& dataset) {
  model::ModelConfig result;
  bool take_vocabulary = false;
  if (config.model.starts_with("{")) {
    result = model::parse_config(config.model, "training configuration: model");
    take_vocabulary = !Json::parse(config.model).contains("vocab_size");
  } else if (fs::is_directory(config.model)) {
    result = model::load_config(config.model + "/config.json");
  } else if (fs::is_regular_file(config.model)) {
    result = model::load_config(config.model);
  } else {
    result = model::preset(config.model);
    take_vocabulary = true;
  }
  if (take_vocabulary) {
    result.vocab_size = dataset.vocab_size;
    const std::int32_t bos = dataset.tokenizer ? dataset.tokenizer->bos_id() : -1;
    const std::int32_t eos = dataset.tokenizer ? dataset.tokenizer->eos_id() : -1;
    result.bos_token_id = std::max(bos, 0);
    result.eos_token_id = std::max(eos, 0);
    result.validate();
  }
  return result;
}

void require_vocabulary(const model::ModelConfig& config, const data::Dataset& dataset) {
  if (config.vocab_size < dataset.vocab_size) {
    throw Error("training: the data has tokens up to " + std::to_string(dataset.vocab_size - 1) +
                ", but the model's vocab_size is " + std::to_string(config.vocab_size) +
                "; use the model's own tokenizer to prepare the data, or another vocab_size");
  }
}

// How many sequences a packed batch is said to hold: a power of two, or the most that there can be. Batches are filled
// up with empty sequences to one of these, because what an operator chooses to do, and the memory that this takes,
// depends on the number, and all of it is planned.
std::vector<std::int64_t> sequence_counts(std::int64_t most) {
  std::vector<std::int64_t> counts;
  for (std::int64_t count = 1; count < most; count *= 2) counts.push_back(count);
  counts.push_back(most);
  return counts;
}

}  // namespace

std::size_t MemoryPlan::total() const {
  std::size_t sum = 0;
  for (const Row& row : rows) sum += row.bytes;
  return sum;
}

Trainer::Trainer(const TrainConfig& config, Events events, bool resume)
    : config_(config),
      events_(std::move(events)),
      context_(Device::cpu(), static_cast<int>(config.threads)),
      folder_(config.out),
      best_loss_(std::numeric_limits<double>::infinity()) {
  config_.validate();
  const auto existing = folder_.checkpoints();
  if (!resume && !existing.empty()) {
    throw Error(config_.out + ": holds a run already (step " + std::to_string(existing.front().step) +
                "); go on with --resume, or choose another folder with --out");
  }
  open_data();
  if (!resume || !load_checkpoint()) build_model(config_.initial_weights);
  flops_per_token_ = model::cost(model_->config(), config_.sequence_length).training_flops;
  plan_memory();
  folder_.create();
  config_.model = model::to_json(model_->config());
  write_file(folder_.config_file(), to_json(config_));
  metrics_ = std::make_unique<MetricsWriter>(folder_.metrics_file(), steps_);
}

Trainer::~Trainer() = default;

void Trainer::open_data() {
  dataset_ = data::open_dataset(config_.data);
  if (config_.order == "automatic") {
    config_.order = dataset_.train.file->documents() < kFewDocuments ? "windows" : "packed";
  }
  data::LoaderConfig loader;
  loader.mode = data::loader_mode_from_name(config_.order);
  // Rows of a batch are independent of how many of them go through the model at a time; packed documents are not cut
  // into micro-batches, each micro-batch is packed.
  const bool packed = loader.mode == data::LoaderMode::packed;
  loader.batch = packed ? config_.sequences_per_micro_batch() : config_.sequences_per_batch();
  loader.length = config_.sequence_length;
  loader.segments = config_.segments;
  loader.seed = static_cast<std::uint64_t>(config_.seed);
  loader_ = std::make_unique<data::Loader>(dataset_.train, loader);
  if (dataset_.validation.file && dataset_.validation.size() > 1) {
    loader.batch = config_.sequences_per_micro_batch();
    loader.shuffle = false;
    loader.single_pass = true;
    evaluation_loader_ = std::make_unique<data::Loader>(dataset_.validation, loader);
  }
  if (config_.train_tokens == 0) {
    config_.train_tokens = std::max(config_.batch_tokens, loader_->tokens_per_epoch());
  }
  config_.validate();
}

void Trainer::build_model(const std::string& weights) {
  const DType dtype = dtype_from_name(config_.dtype);
  if (!weights.empty()) {
    const std::string folder = find_model_folder(weights);
    if (text::has_tokenizer(folder)) {
      data::require_same_tokenizer(dataset_, *text::load_tokenizer(folder), config_.data);
    }
    model_ = model::load_model(folder, {dtype, Device::cpu(), true});
    require_vocabulary(model_->config(), dataset_);
  } else {
    const model::ModelConfig shape = resolve_model(config_, dataset_);
    require_vocabulary(shape, dataset_);
    model_ = std::make_unique<model::LanguageModel>(shape, dtype, Device::cpu(), true);
    model_->parameters().initialize(static_cast<std::uint64_t>(config_.seed));
  }
  optimizer_ = std::make_unique<Optimizer>(
      context_, model_->parameters(),
      OptimizerSettings{config_.beta1, config_.beta2, config_.epsilon, config_.weight_decay, config_.clip_norm});
  states_.clear();
  evaluation_states_.clear();
  if (loader_->config().mode == data::LoaderMode::segments) {
    const std::int64_t rows = config_.sequences_per_micro_batch();
    for (std::int64_t i = 0; i < config_.accumulation(); ++i) states_.push_back(model_->make_state(rows));
    if (evaluation_loader_) evaluation_states_.push_back(model_->make_state(rows));
    if (states_.front().grows()) {
      throw Error(
          "training: order segments carries states of constant size, but this model has layers whose state grows "
          "with the length; give their attention a window_size, or use another order");
    }
  }
}

void Trainer::plan_memory() {
  const std::int64_t rows = config_.sequences_per_micro_batch();
  const std::int64_t length = config_.sequence_length;
  losses_ = Tensor::empty({rows * length}, DType::f32);
  const bool packed = loader_->config().mode == data::LoaderMode::packed;
  const Shape shape = packed ? Shape({1, rows * length}) : Shape({rows, length});
  const Tensor tokens = Tensor::zeros(shape, DType::i32);
  std::vector<std::int64_t> counts = {rows};
  if (packed) {
    std::int64_t most = loader_->max_sequences();
    if (evaluation_loader_) most = std::max(most, evaluation_loader_->max_sequences());
    cu_seqlens_ = Tensor::zeros({most + 1}, DType::i32);
    counts = sequence_counts(most);
  }
  context_.scratch().begin_planning();
  saved_.begin_planning();
  for (const std::int64_t count : counts) {
    nn::Pass pass{context_, &saved_, nn::recompute_from_name(config_.recompute), {}, {}};
    if (packed) pass.sequences.bounds = pass.sequences.host = cu_seqlens_->slice(0, 0, count + 1);
    model_->forward_backward(pass, tokens, tokens, losses_, 1.0, states_.empty() ? nullptr : &states_.front());
    model_->evaluate(pass, tokens, tokens, losses_, evaluation_states_.empty() ? nullptr : &evaluation_states_.front());
  }

  plan_.rows.push_back({"parameters", config_.dtype, model_->parameters().value_bytes()});
  plan_.rows.push_back({"gradients", "f32", model_->parameters().gradient_bytes()});
  plan_.rows.push_back({"optimizer", "moments", optimizer_->moment_bytes()});
  if (optimizer_->master_bytes() > 0) plan_.rows.push_back({"optimizer", "master", optimizer_->master_bytes()});
  std::size_t carried = 0;
  for (const model::DecodeState& state : states_) carried += state.bytes();
  for (const model::DecodeState& state : evaluation_states_) carried += state.bytes();
  if (carried > 0) plan_.rows.push_back({"states", "carried from segment to segment", carried});
  for (const auto& [label, bytes] : saved_.plan()) plan_.rows.push_back({"activations", label, bytes});
  for (const auto& [label, bytes] : context_.scratch().plan()) plan_.rows.push_back({"scratch", label, bytes});

  context_.scratch().commit_plan();
  saved_.commit_plan();
}

nn::Sequences Trainer::planned_sequences(const data::Batch& batch) {
  if (!batch.cu_seqlens) return {};
  const std::int64_t sequences = batch.cu_seqlens.size(0) - 1;
  const std::vector<std::int64_t> counts = sequence_counts(cu_seqlens_->size(0) - 1);
  const std::int64_t count = *std::lower_bound(counts.begin(), counts.end(), sequences);
  const auto* given = batch.cu_seqlens.as<std::int32_t>();
  auto* padded = cu_seqlens_.as<std::int32_t>();
  for (std::int64_t i = 0; i <= count; ++i) padded[i] = given[std::min(i, sequences)];
  const TensorView bounds = cu_seqlens_->slice(0, 0, count + 1);
  return {bounds, bounds, 0};
}

double Trainer::sum_of_losses(const TensorView& losses) const {
  const float* values = losses.as<float>();
  double sum = 0.0;
  for (std::int64_t i = 0; i < losses.numel(); ++i) sum += values[i];
  return sum;
}

double Trainer::forward_backward(const data::Batch& batch, std::int64_t micro) {
  const std::int64_t rows = config_.sequences_per_micro_batch();
  const bool whole = batch.tokens.size(0) <= rows;  // packed, or nothing to cut
  const std::int64_t begin = whole ? 0 : micro * rows;
  const std::int64_t end = whole ? batch.tokens.size(0) : begin + rows;
  model::DecodeState* state = nullptr;
  if (!states_.empty()) {
    state = &states_[static_cast<std::size_t>(micro)];
    for (std::int64_t row = begin; row < end; ++row) {
      if (batch.continues[static_cast<std::size_t>(row)] == 0) state->reset_sequence(row - begin);
    }
  }
  nn::Pass pass{context_, &saved_, nn::recompute_from_name(config_.recompute), planned_sequences(batch), {}};
  model_->forward_backward(pass, batch.tokens.slice(0, begin, end), batch.targets.slice(0, begin, end), losses_,
                           1.0 / static_cast<double>(config_.batch_tokens), state);
  return sum_of_losses(losses_);
}

MetricsRow Trainer::step() {
  const auto start = Clock::now();
  model_->parameters().zero_gradients();
  double loss = 0.0;
  std::int64_t targets = 0;
  for (std::int64_t micro = 0; micro < config_.accumulation(); ++micro) {
    if (micro == 0 || loader_->config().mode == data::LoaderMode::packed) {
      loader_->next(batch_);
      targets += batch_.target_count;
    }
    loss += forward_backward(batch_, micro);
  }
  loss /= static_cast<double>(std::max<std::int64_t>(targets, 1));

  MetricsRow row;
  row.learning_rate = config_.schedule().learning_rate(steps_);
  UpdateReport update;
  if (std::isfinite(loss)) {
    const double scale =
        static_cast<double>(config_.batch_tokens) / static_cast<double>(std::max<std::int64_t>(targets, 1));
    update = optimizer_->step(row.learning_rate, scale);
  } else {
    update = optimizer_->find_culprit();
  }
  steps_ += 1;
  tokens_ += config_.batch_tokens;
  const double elapsed = seconds_since(start);
  seconds_ += elapsed;
  row.step = steps_;
  row.tokens = tokens_;
  row.loss = loss;
  row.bits_per_byte = bits_per_byte(loss, dataset_.train_bytes_per_target);
  row.gradient_norm = update.gradient_norm;
  row.tokens_per_second = static_cast<double>(config_.batch_tokens) / elapsed;
  row.flops_per_second = row.tokens_per_second * flops_per_token_;
  row.seconds = seconds_;
  if (update.done) {
    skipped_in_a_row_ = 0;
    last_done_step_ = steps_;
  } else {
    ++skipped_in_a_row_;
    for (model::DecodeState& state : states_) state.reset();  // they may hold what made the loss non-finite
    row.kind = "skipped";
    row.message =
        "step " + std::to_string(steps_) +
        ": no update, weights as before: " + (std::isfinite(loss) ? "" : "the loss is not finite; ") +
        (update.culprit.empty() ? "all gradients are finite" : "the gradient of " + update.culprit + " is not finite");
  }
  return row;
}

Evaluation Trainer::evaluate(std::int64_t tokens) {
  if (!evaluation_loader_) throw Error("training: the data has no validation part; prepare it with --validation 0.05");
  evaluation_loader_->rewind();
  for (model::DecodeState& state : evaluation_states_) state.reset();
  Evaluation result;
  double sum = 0.0;
  std::int64_t seen = 0;
  data::Batch batch;
  nn::Pass pass{context_};
  while ((tokens == 0 || seen < tokens) && evaluation_loader_->next(batch)) {
    model::DecodeState* state = evaluation_states_.empty() ? nullptr : &evaluation_states_.front();
    for (std::int64_t row = 0; state != nullptr && row < batch.tokens.size(0); ++row) {
      if (batch.continues[static_cast<std::size_t>(row)] == 0) state->reset_sequence(row);
    }
    pass.sequences = planned_sequences(batch);
    const TensorView losses = losses_->slice(0, 0, batch.tokens.numel());
    model_->evaluate(pass, batch.tokens, batch.targets, losses, state);
    sum += sum_of_losses(losses);
    result.targets += batch.target_count;
    seen += batch.tokens.numel();
  }
  result.loss = sum / static_cast<double>(std::max<std::int64_t>(result.targets, 1));
  result.bits_per_byte = bits_per_byte(result.loss, dataset_.validation_bytes_per_target);
  return result;
}

void Trainer::evaluate_and_record() {
  const auto start = Clock::now();
  const Evaluation evaluation = evaluate(config_.evaluation_tokens);
  seconds_ += seconds_since(start);
  MetricsRow row;
  row.kind = "eval";
  row.step = steps_;
  row.tokens = tokens_;
  row.loss = evaluation.loss;
  row.bits_per_byte = evaluation.bits_per_byte;
  row.perplexity = std::exp(evaluation.loss);
  row.seconds = seconds_;
  metrics_->write(row);
  last_evaluation_ = row;
  if (events_.evaluation) events_.evaluation(row);
}

Outcome Trainer::run() {
  std::int64_t saved_step = steps_ == 0 ? -1 : steps_;
  while (steps_ < total_steps()) {
    const MetricsRow row = step();
    const bool last = steps_ == total_steps();
    if (row.kind == "skipped" || last || steps_ % config_.log_every == 0) metrics_->write(row);
    if (events_.step) events_.step(row);
    if (skipped_in_a_row_ >= config_.max_skipped_updates) {
      throw Error(
          "training stopped: " + std::to_string(skipped_in_a_row_) + " updates in a row were not made (" + row.message +
          "); the weights are those of step " + std::to_string(last_done_step_) +
          ". Try a lower learning_rate, a longer warm-up, a smaller clip_norm or dtype f32; checkpoints are in " +
          config_.out);
    }
    const bool stop = !last && events_.stop_requested && events_.stop_requested();
    const bool evaluate_now = config_.evaluate_every > 0 && steps_ % config_.evaluate_every == 0;
    const bool save_now = config_.checkpoint_every > 0 && steps_ % config_.checkpoint_every == 0;
    if (evaluation_loader_ && !stop && (last || evaluate_now || save_now)) {
      evaluate_and_record();
    }
    if (stop || last || save_now) {
      save();
      saved_step = steps_;
    }
    if (stop) return Outcome::interrupted;
  }
  if (saved_step != steps_) save();
  return Outcome::finished;
}

}  // namespace flashgla::train
