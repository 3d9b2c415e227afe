// Saving and resuming: a checkpoint holds everything that decides what comes next, so that a resumed run's losses are
// those of one that never stopped, to the last bit.
#include "flashgla/model/checkpoint.h"

#include <cmath>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <tuple>

#include "flashgla/base/file.h"
#include "flashgla/base/json.h"
#include "flashgla/base/random.h"
#include "flashgla/train/trainer.h"

namespace flashgla::train {

namespace {

using Json = nlohmann::ordered_json;
constexpr const char* kOptimizerFile = "optimizer.safetensors";

// A run whose data would come in another order from here on is refused, not continued with other data.
void require_same_draws(const std::string& path, const std::string& progress) {
  const Json json = Json::parse(progress, nullptr, /*allow_exceptions=*/false);
  const Json version = json.is_object() ? json.value("random_version", Json(1)) : Json(1);
  if (version == random::kVersion) return;
  throw Error(path + ": the run was begun by a FlashGLA whose random numbers are of version " + version.dump() +
              "; this one's are of version " + std::to_string(random::kVersion) +
              ", and its data would come in another order. Finish the run with the program that began it, or begin a "
              "new run with this one's weights (--initial-weights)");
}

}  // namespace

std::vector<model::NamedTensor> Trainer::state_tensors() const {
  std::vector<model::NamedTensor> tensors = optimizer_->tensors();
  for (std::size_t i = 0; i < states_.size(); ++i) {
    tensors.push_back({"carried_state." + std::to_string(i), states_[i].constant()});
    tensors.push_back({"carried_positions." + std::to_string(i), states_[i].positions()});
  }
  return tensors;
}

void Trainer::start_saving() {
  finish_saving();
  Json progress = Json::object();
  progress["random_version"] = random::kVersion;
  progress["step"] = steps_;
  progress["tokens"] = tokens_;
  progress["updates"] = optimizer_->updates();
  progress["skipped_in_a_row"] = skipped_in_a_row_;
  progress["last_done_step"] = last_done_step_;
  progress["seconds"] = seconds_;
  const bool best = last_evaluation_ && last_evaluation_->step == steps_ && last_evaluation_->loss < best_loss_;
  if (best || best_step_ >= 0) {
    progress["best_step"] = best ? steps_ : best_step_;
    progress["best_loss"] = best ? last_evaluation_->loss : best_loss_;
  }
  if (std::isfinite(progress_.lowest_loss)) {
    progress["early_end"] = {{"accuracy", progress_.accuracy},
                             {"lowest_loss", progress_.lowest_loss},
                             {"highest_accuracy", progress_.highest_accuracy},
                             {"since_best", progress_.since_best}};
  }
  if (evaluation_due_) progress["evaluation_due"] = true;
  progress["loader"] = loader_->save_state();
  progress["config"] = Json::parse(to_json(config_));
  saving_step_ = steps_;
  saving_best_.reset();
  if (best) saving_best_ = {steps_, last_evaluation_->loss};
  interrupted_ = interrupted_ || !snapshot_;
  if (snapshot_) snapshot_->take(context_.queue());
  const auto copied = std::make_shared<Event>(context_.queue());
  copied->record();
  const auto records = records_of_libraries();
  saving_ = std::async(std::launch::async, [this, copied, records, step = steps_, text = progress.dump()] {
    copied->synchronize();
    model::SaveOptions options;
    options.transfer = transfer_.get();
    std::vector<model::NamedTensor> state = state_tensors();
    if (snapshot_) {
      state = snapshot_->of(std::move(state));
      options.copy_of = [this](const TensorView& value) { return snapshot_->of(value); };
    }
    const auto write = [&](const std::string& folder) {
      model::save_model(*model_, folder, options);
      if (dataset_.tokenizer) dataset_.tokenizer->save(folder);
      for (const auto& [name, record] : records) write_file(folder + "/" + name, record);
      model::write_safetensors(folder + "/" + kOptimizerFile, state, {}, transfer_.get());
    };
    return folder_.save(step, write, text);
  });
  if (!snapshot_) saving_.wait();
}

std::string Trainer::finish_saving() {
  if (!saving_.valid()) return {};
  const std::string path = saving_.get();
  if (saving_best_) {
    std::tie(best_step_, best_loss_) = *saving_best_;
    folder_.mark_best(best_step_);
  }
  folder_.prune(config_.keep_checkpoints, saving_step_);
  if (events_.checkpoint) events_.checkpoint(path);
  return path;
}

void Trainer::announce_saved() {
  if (saving_.valid() && saving_.wait_for(std::chrono::seconds(0)) == std::future_status::ready) finish_saving();
}

std::string Trainer::save() {
  begin();
  report(0);
  start_saving();
  return finish_saving();
}

std::optional<Trainer::Found> Trainer::find_checkpoint() const {
  const auto found = folder_.checkpoints();
  for (const CheckpointInfo& checkpoint : found) {
    std::string progress;
    try {
      progress = verify_checkpoint(checkpoint.path);
    } catch (const Error& error) {
      if (events_.notice) events_.notice("passed over a damaged checkpoint: " + std::string(error.what()));
      continue;
    }
    require_same_draws(checkpoint.path, progress);
    return Found{checkpoint.path, progress};
  }
  if (!found.empty()) {
    throw Error(config_.out + ": none of its checkpoints is whole; begin anew in another folder with --out");
  }
  return std::nullopt;
}

void Trainer::restore(const Found& found) {
  const auto& [path, progress] = found;
  model::SafetensorsReader(path + "/" + kOptimizerFile).read(state_tensors());
  try {
    const Json json = Json::parse(progress);
    steps_ = json.at("step").get<std::int64_t>();
    tokens_ = json.at("tokens").get<std::int64_t>();
    optimizer_->set_updates(json.at("updates").get<std::int64_t>());
    skipped_in_a_row_ = json.at("skipped_in_a_row").get<std::int64_t>();
    last_done_step_ = json.at("last_done_step").get<std::int64_t>();
    seconds_ = json.at("seconds").get<double>();
    if (json.contains("best_step")) {
      best_step_ = json.at("best_step").get<std::int64_t>();
      best_loss_ = json.at("best_loss").get<double>();
    }
    if (json.contains("early_end")) {
      const Json& early = json.at("early_end");
      progress_ = {early.at("accuracy").get<double>(), early.at("lowest_loss").get<double>(),
                   early.at("highest_accuracy").get<double>(), early.at("since_best").get<std::int64_t>()};
    }
    evaluation_due_ = json.value("evaluation_due", false);
    loader_->restore(json.at("loader").get<std::string>());
    feed_->forget();
  } catch (const Json::exception& error) {
    throw Error(path + "/trainer.json: " + json_reason(error));
  }
  restored_step_ = steps_;
}

}  // namespace flashgla::train
