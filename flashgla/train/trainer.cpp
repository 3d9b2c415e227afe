#include "flashgla/train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <numbers>
#include <string_view>
#include <utility>

#include "flashgla/base/file.h"
#include "flashgla/base/json.h"
#include "flashgla/base/memory.h"
#include "flashgla/base/names.h"
#include "flashgla/model/checkpoint.h"
#include "flashgla/model/config.h"
#include "flashgla/model/cost.h"
#include "flashgla/ops/step_outcome/step_outcome.h"

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
  const auto parse = [&](std::string_view json, const std::string& source) {
    result = model::parse_config(std::string(json), source);
    take_vocabulary = json.find("\"vocab_size\"") == std::string_view::npos;
  };
  if (config.model.starts_with("{")) {
    parse(config.model, "training configuration: model");
  } else if (fs::is_directory(config.model)) {
    result = model::load_config(config.model + "/config.json");
  } else if (fs::is_regular_file(config.model)) {
    const MappedFile file(config.model);
    parse({reinterpret_cast<const char*>(file.data()), file.size()}, config.model);
  } else if (config.model.find('/') != std::string::npos) {
    throw Error("training configuration", "model", "is '" + config.model + "', where there is nothing",
                "a preset, a folder with a config.json, or such a file");
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

// Rows that go on from nothing begin with states of zeros.
void begin_rows(const Queue& queue, const model::DecodeState& state, const std::vector<std::uint8_t>& continues) {
  if (std::find(continues.begin(), continues.end(), 1) == continues.end()) return state.queue_reset(queue);
  for (std::size_t row = 0; row < continues.size(); ++row) {
    if (continues[row] == 0) state.queue_reset_sequence(queue, static_cast<std::int64_t>(row));
  }
}

TrainConfig settled(TrainConfig config) {
  config.validate();
  const Device device = config.resolved_device();
  if (config.device == "auto") config.device = name_of(device);
  if (config.dtype == "automatic") config.dtype = device == Device::cpu() ? "f32" : "bf16";
  return config;
}

}  // namespace

Trainer::Trainer(const TrainConfig& config, Events events, bool resume, bool plan_only)
    : config_(settled(config)),
      device_asked_for_(config.device),
      micro_batch_asked_for_(config.micro_batch),
      events_(std::move(events)),
      context_(device_from_name(config_.device), static_cast<int>(config.threads)),
      folder_(config.out),
      saved_(context_.device()),
      graphs_(context_.queue(), config_.graphs == "on"),
      best_loss_(std::numeric_limits<double>::infinity()) {
  const auto existing = folder_.checkpoints();
  if (!resume && !existing.empty()) {
    throw Error(config_.out + ": holds a run already (step " + std::to_string(existing.front().step) +
                "); go on with --resume, or choose another folder with --out");
  }
  open_data();
  std::optional<Found> found;
  if (resume) found = find_checkpoint();
  if (found) require_same_run(*found);
  build_model(found ? found->path : config_.initial_weights, found.has_value(), plan_only);
  flops_per_token_ = model::cost(model_->config(), config_.sequence_length).training_flops;
  plan_memory(found.has_value());
  if (loader_->labels() > 0) {  // the head sees the places alone that a task asks for
    const double share = static_cast<double>(loader_->labels()) / static_cast<double>(config_.sequence_length);
    flops_per_token_ -= (1.0 - share) * 6.0 * static_cast<double>(model_->config().vocab_size) *
                        static_cast<double>(model_->config().hidden_size);
  }
  plan_products(found ? found->path : "");
  if (found) restore(*found);
  if (steps_ > total_steps()) {
    throw Error(
        "training configuration", "train_tokens", "is " + std::to_string(config_.train_tokens),
        "at least the " + std::to_string(tokens_) + " that the run has had (step " + std::to_string(steps_) + ")");
  }
  config_.model = model::to_json(model_->config());
}

Trainer::~Trainer() {
  if (saving_.valid()) saving_.wait();
  context_.queue().synchronize();
}

void Trainer::begin() {
  if (metrics_) return;
  folder_.create();
  if (restored_step_) {
    for (const std::string& aside : folder_.set_aside_after(*restored_step_)) {
      if (events_.notice) events_.notice("kept the damaged checkpoint as " + aside);
    }
    // A program that ended between a checkpoint's last file and these names has left older ones.
    folder_.mark_latest(*restored_step_);
    if (best_step_ >= 0) folder_.mark_best(best_step_);
  }
  TrainConfig written = config_;
  written.device = device_asked_for_;  // the run may go on on another machine
  written.micro_batch = micro_batch_asked_for_;
  write_file(folder_.config_file(), to_json(written));
  for (const char* name : {kProductsFile, kAttentionFile}) fs::remove(folder_.path() + "/" + name);
  for (const auto& [name, text] : records_of_libraries()) write_file(folder_.path() + "/" + name, text);
  metrics_ = std::make_unique<MetricsWriter>(folder_.metrics_file(), restored_step_.value_or(0), evaluation_due_);
}

void Trainer::open_data() {
  dataset_ = data::open_dataset(config_.data);
  if (config_.order == "automatic") {
    config_.order = dataset_.train.labels                              ? "labelled"
                    : dataset_.train.file->documents() < kFewDocuments ? "windows"
                                                                       : "packed";
  }
  if (config_.stop_accuracy > 0.0 && !dataset_.validation.labels) {
    throw Error("training configuration", "stop_accuracy", "is " + std::to_string(config_.stop_accuracy),
                "0 with data that are no task with a validation part (`flashgla data mqar`)");
  }
  if (config_.patience > 0 && !dataset_.validation.file) {
    throw Error("training configuration", "patience", "is " + std::to_string(config_.patience),
                "0 with data without a validation part");
  }
}

void Trainer::build_model(const std::string& weights, bool resumed, bool plan_only) {
  const DType dtype = dtype_from_name(config_.dtype);
  if (!weights.empty()) {
    const std::string folder = find_model_folder(weights);
    if (text::has_tokenizer(folder)) {
      data::require_same_tokenizer(dataset_, *text::load_tokenizer(folder), config_.data);
    }
    const model::ModelConfig shape = model::load_config(folder + "/config.json");
    if (!resumed && config_.model != TrainConfig().model) require_same_model(shape, folder);
    require_memory_for(shape, resumed);
    model_ = model::load_model(folder, {dtype, context_.device(), true});
    require_vocabulary(model_->config(), dataset_);
  } else {
    const model::ModelConfig shape = resolve_model(config_, dataset_);
    require_vocabulary(shape, dataset_);
    require_memory_for(shape, resumed);
    model_ = std::make_unique<model::LanguageModel>(shape, dtype, context_.device(), true);
    if (!plan_only) model_->parameters().initialize(static_cast<std::uint64_t>(config_.seed));
  }
  optimizer_ = std::make_unique<Optimizer>(
      context_, model_->parameters(),
      OptimizerSettings{config_.beta1, config_.beta2, config_.epsilon, config_.weight_decay, config_.clip_norm,
                        optimizer_state_from_name(config_.optimizer_state), static_cast<std::uint64_t>(config_.seed)});
}

void Trainer::require_same_model(const model::ModelConfig& stored, const std::string& where) const {
  const auto there = Json::parse(model::to_json(stored));
  const auto asked = Json::parse(model::to_json(resolve_model(config_, dataset_)));
  for (const auto& [field, value] : asked.items()) {
    const Json other = there.contains(field) ? there.at(field) : Json();
    if (other == value || field == "architectures") continue;
    throw Error("training configuration: model", field, "is " + value.dump(), other.dump() + " as in " + where);
  }
}

void Trainer::require_same_run(const Found& found) {
  require_same_model(model::load_config(found.path + "/config.json"),
                     "the run that goes on (" + found.path + "/config.json)");
  const Json progress = Json::parse(found.progress, nullptr, /*allow_exceptions=*/false);
  const Json config = progress.is_object() ? progress.value("config", Json()) : Json();
  if (!config.is_object()) throw Error(found.path + "/trainer.json: expected the run's config");
  TrainConfig begun = config_;
  parse_config(begun, config.dump(), found.path + "/trainer.json: config");
  const auto require = [](const char* field, const auto& asked, const auto& run) {
    if (asked == run) return;
    if constexpr (std::is_same_v<decltype(asked), const std::string&>) {
      throw Error("training configuration", field, "is '" + asked + "'", "'" + run + "', with which the run was begun");
    } else {
      throw Error("training configuration", field, "is " + std::to_string(asked),
                  std::to_string(run) + ", with which the run was begun");
    }
  };
  require("dtype", config_.dtype, begun.dtype);
  require("order", config_.order, begun.order);
  require("sequence_length", config_.sequence_length, begun.sequence_length);
  require("batch_tokens", config_.batch_tokens, begun.batch_tokens);
  require("segments", config_.segments, begun.segments);
  require("seed", config_.seed, begun.seed);
  require("optimizer_state", config_.optimizer_state, begun.optimizer_state);
  if (!config_.initial_weights.empty()) require("initial_weights", config_.initial_weights, begun.initial_weights);
  // Another micro-batch rounds otherwise; what is packed, and the states that are carried, are of one each.
  if (config_.micro_batch == 0) config_.micro_batch = begun.micro_batch;
  if (config_.order == "packed" || config_.order == "segments") {
    require("micro_batch", config_.micro_batch, begun.micro_batch);
  }
  try {
    data::Loader(dataset_.train, loader_config()).restore(progress.at("loader").get<std::string>());
  } catch (const Error& error) {
    throw Error("training configuration: data is '" + config_.data + "', which is not what the run was begun with ('" +
                begun.data + "'): " + error.what());
  } catch (const Json::exception& error) {
    throw Error(found.path + "/trainer.json: " + json_reason(error));
  }
}

void Trainer::do_micro_batch(const StepGraphs::Key& key) {
  const MicroBatch batch = feed_->planned(key.bucket);
  nn::ParameterStore& parameters = model_->parameters();
  if (key.first) parameters.renew_gradients(context_);
  nn::Pass pass{context_, &saved_, nn::recompute_from_name(config_.recompute), batch.sequences, {}, {}};
  pass.dropout = {config_.dropout,
                  config_.resolved_embedding_dropout(),
                  config_.resolved_attention_dropout(),
                  static_cast<std::uint64_t>(config_.seed),
                  optimizer_->counter(),
                  batch.number};
  model_->forward_backward(pass, batch.tokens, batch.targets, losses_, 1.0 / static_cast<double>(config_.batch_tokens),
                           states_.empty() ? nullptr : &states_[static_cast<std::size_t>(key.state)],
                           {batch.places, {}});
  ops::step_outcome::sum(context_, losses_, loss(), !key.first);
}

void Trainer::do_evaluation(const StepGraphs::Key& key) {
  const MicroBatch batch = evaluation_feed_->planned(key.bucket);
  nn::Pass pass{context_, nullptr, nn::Recompute::nothing, batch.sequences, {}, {}};
  model_->evaluate(pass, batch.tokens, batch.targets, losses_,
                   evaluation_states_.empty() ? nullptr : &evaluation_states_[static_cast<std::size_t>(key.state)],
                   {batch.places, hits_});
  ops::step_outcome::sum(context_, losses_, loss(), !key.first);
  if (hits_) ops::step_outcome::sum(context_, hits_, hits(), !key.first);
}

void Trainer::do_update() {
  optimizer_->queue_update(loss());
  // States may hold what made the loss non-finite.
  for (const model::DecodeState& state : states_) {
    for (const TensorView& view : {state.constant(), state.positions()}) {
      ops::step_outcome::clear_unless(context_, optimizer_->made(), view);
    }
  }
  ops::step_outcome::find_unless(context_, optimizer_->made(), model_->parameters().all_gradients(),
                                 first_non_finite());
}

TensorView Trainer::loss() const { return record_->slice(0, 0, 1); }

TensorView Trainer::first_non_finite() const {
  TensorView position = record_->slice(0, 1, 2);
  position.dtype = DType::i64;
  return position;
}

void Trainer::queue_step() {
  Pending pending;
  pending.start = Clock::now();
  pending.slot = queued_ % marks_.size();
  pending.follows = !std::exchange(interrupted_, false);
  marks_[pending.slot]->begin.record();
  for (std::int64_t micro = 0; micro < config_.accumulation(); ++micro) {
    MicroBatch batch;
    feed_->next(batch, micro);
    pending.targets += batch.target_count;
    StepGraphs::Key key{.piece = StepGraphs::Key::Piece::micro_batch, .first = micro == 0, .bucket = batch.bucket};
    if (!states_.empty()) {
      key.state = micro;
      begin_rows(context_.queue(), states_[static_cast<std::size_t>(micro)], batch.continues);
    }
    graphs_.run(key, [this, key] { do_micro_batch(key); });
  }
  MetricsRow& row = pending.row;
  row.learning_rate = config_.schedule().learning_rate(steps_);
  optimizer_->set_scalars(row.learning_rate, static_cast<double>(config_.batch_tokens) /
                                                 static_cast<double>(std::max<std::int64_t>(pending.targets, 1)));
  graphs_.run({.piece = StepGraphs::Key::Piece::update}, [this] { do_update(); });
  context_.queue().copy(static_cast<Record*>(pinned_.get()) + pending.slot, record_->data, sizeof(Record));
  marks_[pending.slot]->end.record();
  optimizer_->queue_report();  // and with it the record's copy
  ++queued_;
  steps_ += 1;
  tokens_ += config_.batch_tokens;
  row.step = steps_;
  row.tokens = tokens_;
  pending_.push_back(std::move(pending));
}

double Trainer::seconds_of(const Pending& pending) const {
  const std::size_t last = (pending.slot + marks_.size() - 1) % marks_.size();
  const Event& begin = pending.follows ? marks_[last]->end : marks_[pending.slot]->begin;
  const double milliseconds = marks_[pending.slot]->end.elapsed_milliseconds(begin);
  if (milliseconds > 0.0) return 1e-3 * milliseconds;
  return std::chrono::duration<double>(Clock::now() - std::max(pending.start, last_row_)).count();
}

MetricsRow Trainer::next_row() {
  const Pending pending = std::move(pending_.front());
  pending_.pop_front();
  const UpdateReport update = optimizer_->next_report();  // the host waits
  const Record record = static_cast<const Record*>(pinned_.get())[pending.slot];
  const auto now = Clock::now();
  seconds_ += std::chrono::duration<double>(now - std::max(pending.start, last_row_)).count();
  const double elapsed = seconds_of(pending);
  last_row_ = now;
  MetricsRow row = pending.row;
  row.loss = record.loss / static_cast<double>(std::max<std::int64_t>(pending.targets, 1));
  row.bits_per_byte = bits_per_byte(row.loss, dataset_.train_bytes_per_target);
  row.gradient_norm = update.gradient_norm;
  row.tokens_per_second = static_cast<double>(config_.batch_tokens) / elapsed;
  row.flops_per_second = row.tokens_per_second * flops_per_token_;
  row.seconds = seconds_;
  if (update.done) {
    skipped_in_a_row_ = 0;
    last_done_step_ = row.step;
  } else {
    ++skipped_in_a_row_;
    const std::string culprit = model_->parameters().name_at(record.first_non_finite);
    row.kind = "skipped";
    row.message = "step " + std::to_string(row.step) +
                  ": no update, weights as before: " + (std::isfinite(row.loss) ? "" : "the loss is not finite; ") +
                  (culprit.empty() ? "all gradients are finite" : "the gradient of " + culprit + " is not finite");
  }
  return row;
}

TensorView Trainer::hits() const { return record_->slice(0, 2, 3); }

MetricsRow Trainer::step() {
  queue_step();
  return next_row();
}

Evaluation Trainer::evaluate(std::int64_t tokens) { return *evaluate_unless({}, tokens); }

std::optional<Evaluation> Trainer::evaluate_unless(const std::function<bool()>& stop, std::int64_t tokens) {
  if (!evaluation_feed_) throw Error("training: the data has no validation part; prepare it with --validation 0.05");
  interrupted_ = true;
  evaluation_feed_->restart(tokens);
  for (const model::DecodeState& state : evaluation_states_) state.queue_reset(context_.queue());
  Evaluation result;
  bool first = true;
  MicroBatch batch;
  while (evaluation_feed_->next(batch)) {
    if (stop && stop()) return std::nullopt;
    StepGraphs::Key key{
        .piece = StepGraphs::Key::Piece::evaluation, .first = std::exchange(first, false), .bucket = batch.bucket};
    if (!evaluation_states_.empty()) {
      key.state = batch.place;
      begin_rows(context_.queue(), evaluation_states_[static_cast<std::size_t>(key.state)], batch.continues);
    }
    graphs_.run(key, [this, key] { do_evaluation(key); });
    result.targets += batch.target_count;
  }
  auto* sum = static_cast<double*>(pinned_.get());
  context_.queue().copy(sum, record_->data, record_->bytes());
  context_.queue().synchronize();
  result.loss = *sum / static_cast<double>(std::max<std::int64_t>(result.targets, 1));
  result.bits_per_byte = bits_per_byte(result.loss, dataset_.validation_bytes_per_target);
  result.accuracy = hits_ ? sum[2] / static_cast<double>(std::max<std::int64_t>(result.targets, 1)) : kNaN;
  return result;
}

bool Trainer::evaluate_and_record() {
  const auto start = Clock::now();
  const std::optional<Evaluation> made = evaluate_unless(events_.stop_requested, config_.evaluation_tokens);
  evaluation_due_ = !made;
  if (!made) return false;
  const Evaluation& evaluation = *made;
  seconds_ += seconds_since(start);
  MetricsRow row;
  row.kind = "eval";
  row.step = steps_;
  row.tokens = tokens_;
  row.loss = evaluation.loss;
  row.bits_per_byte = evaluation.bits_per_byte;
  row.perplexity = std::exp(evaluation.loss);
  row.accuracy = evaluation.accuracy;
  row.seconds = seconds_;
  metrics_->write(row);
  last_evaluation_ = row;
  progress_.accuracy = hits_ ? row.accuracy : 0.0;
  const bool better = row.loss < progress_.lowest_loss || progress_.accuracy > progress_.highest_accuracy;
  progress_.since_best = better ? 0 : progress_.since_best + 1;
  progress_.lowest_loss = std::min(progress_.lowest_loss, row.loss);
  progress_.highest_accuracy = std::max(progress_.highest_accuracy, progress_.accuracy);
  if (events_.evaluation) events_.evaluation(row);
  return true;
}

void Trainer::mark_if_best() {
  if (!(last_evaluation_->loss < best_loss_)) return;
  best_step_ = steps_;
  best_loss_ = last_evaluation_->loss;
  folder_.mark_best(best_step_);
}

std::string Trainer::enough() const {
  if (config_.stop_accuracy > 0.0 && progress_.accuracy >= config_.stop_accuracy) {
    return "validation's accuracy " + std::to_string(progress_.accuracy) + " reached stop_accuracy " +
           std::to_string(config_.stop_accuracy);
  }
  if (config_.patience > 0 && progress_.since_best >= config_.patience) {
    return std::to_string(progress_.since_best) + " evaluations in a row were not better than the best (patience)";
  }
  return {};
}

void Trainer::report(std::size_t left) {
  while (!pending_.empty() && (pending_.size() > left || optimizer_->report_is_there())) {
    const MetricsRow row = next_row();
    if (row.kind == "skipped" || row.step == total_steps() || row.step % config_.log_every == 0) metrics_->write(row);
    if (events_.step) events_.step(row);
    if (skipped_in_a_row_ < config_.max_skipped_updates) continue;
    const std::string kept =
        folder_.checkpoints().empty() ? "there is no checkpoint" : "checkpoints are in " + config_.out;
    throw Error("training stopped: " + std::to_string(skipped_in_a_row_) + " updates in a row were not made (" +
                row.message + "); the weights are those of step " + std::to_string(last_done_step_) +
                ". Try a lower learning_rate, a longer warm-up, a smaller clip_norm or dtype f32; " + kept);
  }
}

Outcome Trainer::run() {
  begin();
  std::int64_t saved_step = steps_ == 0 ? -1 : steps_;
  const auto due = [&](std::int64_t every) { return every > 0 && steps_ % every == 0; };
  if (std::exchange(evaluation_due_, false) && evaluation_feed_) {
    if (!evaluate_and_record()) return Outcome::interrupted;
    if (due(config_.checkpoint_every) || steps_ == total_steps() || !enough().empty()) mark_if_best();
  }
  while (steps_ < total_steps() && enough().empty()) {
    queue_step();
    const bool last = steps_ == total_steps();
    bool stop = !last && events_.stop_requested && events_.stop_requested();
    const bool evaluation = last || due(config_.checkpoint_every) || due(config_.evaluate_every);
    const bool evaluate_now = evaluation && !stop;
    evaluation_due_ = evaluation && stop;  // who stops does not wait; who goes on begins with it
    const bool checkpoint = last || due(config_.checkpoint_every);
    // While the device makes this step, the row of the one before it is written.
    report(checkpoint || stop || evaluate_now ? 0 : 1);
    announce_saved();
    if (evaluation_feed_ && evaluate_now && !evaluate_and_record()) stop = true;
    if (checkpoint || stop) {
      start_saving();
      saved_step = steps_;
    }
    if (stop) {
      finish_saving();
      return Outcome::interrupted;
    }
  }
  if (steps_ < total_steps() && events_.notice) {
    events_.notice("ended at step " + std::to_string(steps_) + " of " + std::to_string(total_steps()) + ": " +
                   enough());
  }
  if (saved_step != steps_) start_saving();
  finish_saving();
  if (last_evaluation_ && !std::isfinite(last_evaluation_->loss)) {
    throw Error("training ended with weights that are broken: the validation loss is not finite (step " +
                std::to_string(last_evaluation_->step) +
                "). Begin anew with a lower learning_rate, a longer warm-up or a smaller clip_norm" +
                (best_step_ >= 0 ? "; the best checkpoint is of step " + std::to_string(best_step_) : ""));
  }
  return Outcome::finished;
}

}  // namespace flashgla::train
