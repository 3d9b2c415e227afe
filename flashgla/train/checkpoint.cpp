// Saving and resuming: a checkpoint holds everything that decides what comes next, so that a resumed run's losses are
// those of one that never stopped, to the last bit.
#include "flashgla/model/checkpoint.h"

#include <cmath>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>

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

std::string Trainer::save() {
  Json progress = Json::object();
  progress["random_version"] = random::kVersion;
  progress["step"] = steps_;
  progress["tokens"] = tokens_;
  progress["updates"] = optimizer_->updates();
  progress["skipped_in_a_row"] = skipped_in_a_row_;
  progress["last_done_step"] = last_done_step_;
  progress["seconds"] = seconds_;
  if (best_step_ >= 0) {
    progress["best_step"] = best_step_;
    progress["best_loss"] = best_loss_;
  }
  progress["loader"] = loader_->save_state();
  progress["config"] = Json::parse(to_json(config_));
  const bool best = last_evaluation_ && last_evaluation_->step == steps_ && last_evaluation_->loss < best_loss_;
  if (best) {
    progress["best_step"] = steps_;
    progress["best_loss"] = last_evaluation_->loss;
  }
  const std::string path = folder_.save(
      steps_,
      [&](const std::string& folder) {
        model::save_model(*model_, folder);
        if (dataset_.tokenizer) dataset_.tokenizer->save(folder);
        model::write_safetensors(folder + "/" + kOptimizerFile, state_tensors());
      },
      progress.dump());
  if (best) {
    best_step_ = steps_;
    best_loss_ = last_evaluation_->loss;
    folder_.mark_best(steps_);
  }
  folder_.prune(config_.keep_checkpoints);
  if (events_.checkpoint) events_.checkpoint(path);
  return path;
}

bool Trainer::load_checkpoint() {
  const auto found = folder_.checkpoints();
  for (const CheckpointInfo& checkpoint : found) {
    std::string progress;
    try {
      progress = verify_checkpoint(checkpoint.path);
    } catch (const Error& error) {
      if (events_.notice) events_.notice("passed over a damaged checkpoint: " + std::string(error.what()));
      continue;
    }
    restore(checkpoint.path, progress);
    return true;
  }
  if (!found.empty()) {
    throw Error(config_.out + ": none of its checkpoints is whole; begin anew in another folder with --out");
  }
  return false;
}

void Trainer::restore(const std::string& path, const std::string& progress) {
  require_same_draws(path, progress);
  build_model(path);
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
    loader_->restore(json.at("loader").get<std::string>());
  } catch (const Json::exception& error) {
    throw Error(path + "/trainer.json: " + error.what());
  }
}

}  // namespace flashgla::train
