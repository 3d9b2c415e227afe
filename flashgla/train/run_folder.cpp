#include "flashgla/train/run_folder.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "flashgla/base/error.h"
#include "flashgla/base/json.h"
#include "flashgla/model/checksum.h"

namespace flashgla::train {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr const char* kPrefix = "step-";
constexpr const char* kTemporary = ".partial";
constexpr const char* kDamaged = ".damaged";

std::string checksum(const void* data, std::size_t bytes) {
  model::Checksum hash;
  hash.add(data, bytes);
  return hash.text();
}

std::string checkpoint_name(std::int64_t step) {
  std::string digits = std::to_string(step);
  return kPrefix + std::string(digits.size() < 8 ? 8 - digits.size() : 0, '0') + digits;
}

std::optional<std::int64_t> step_of(const std::string& name) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  const char* begin = name.data() + std::char_traits<char>::length(kPrefix);
  const char* end = name.data() + name.size();
  std::int64_t step = 0;
  const auto [stopped, error] = std::from_chars(begin, end, step);
  if (error != std::errc() || stopped != end) return std::nullopt;
  return step;
}

void sync_folder(const fs::path& folder) {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return;
  ::fsync(descriptor);
  ::close(descriptor);
}

std::string pointer(const fs::path& folder, const char* name) {
  const fs::path file = folder / name;
  if (!fs::is_regular_file(file)) return {};
  std::string text = read_file(file.string());
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  return text;
}

}  // namespace

void RunFolder::create() {
  const fs::path checkpoints = fs::path(path_) / "checkpoints";
  make_folder(checkpoints.string());
  if (!lock_) lock_ = FileLock::unless_held(path_ + "/train.lock");
  if (!lock_) {
    throw Error(path_ + ": another process trains in this folder; wait for its end, or choose another one with --out");
  }
  remove_partial_files(path_, {kConfigFile, kMetricsFile, kProductsFile, kAttentionFile});
  remove_partial_files(checkpoints.string(), {"latest", "best"});
  std::vector<fs::path> unfinished;
  for (const auto& entry : fs::directory_iterator(checkpoints)) {
    if (entry.path().extension() == kTemporary && step_of(entry.path().stem().string())) {
      unfinished.push_back(entry.path());
    }
  }
  for (const fs::path& folder : unfinished) fs::remove_all(folder);
}

std::vector<CheckpointInfo> RunFolder::checkpoints() const {
  std::vector<CheckpointInfo> result;
  const fs::path folder = fs::path(path_) / "checkpoints";
  if (!fs::is_directory(folder)) return result;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const auto step = step_of(entry.path().filename().string());
    if (step && entry.is_directory()) result.push_back({*step, entry.path().string()});
  }
  std::sort(result.begin(), result.end(), [](const auto& a, const auto& b) { return a.step > b.step; });
  return result;
}

std::string RunFolder::save(std::int64_t step, const std::function<void(const std::string& folder)>& write,
                            const std::string& progress) const {
  const fs::path folder = fs::path(path_) / "checkpoints";
  const fs::path target = folder / checkpoint_name(step);
  const fs::path temporary = folder / (checkpoint_name(step) + kTemporary);
  try {
    fs::remove_all(temporary);
    fs::create_directories(temporary);
    write(temporary.string());
    Json root = Json::object();
    root["format"] = 1;
    root["progress"] = Json::parse(progress);
    Json files = Json::object();
    std::vector<fs::path> names;
    for (const auto& entry : fs::directory_iterator(temporary)) names.push_back(entry.path());
    std::sort(names.begin(), names.end());
    for (const fs::path& name : names) {
      const MappedFile content(name.string());
      files[name.filename().string()] = {{"bytes", content.size()}, {"xxh3", checksum(content.data(), content.size())}};
    }
    root["files"] = files;
    const std::string text = root.dump();
    root["xxh3"] = checksum(text.data(), text.size());
    write_file((temporary / "trainer.json").string(), root.dump(1) + "\n");
    sync_folder(temporary);
    fs::remove_all(target);
    fs::rename(temporary, target);
    sync_folder(folder);
    mark_latest(step);
  } catch (const std::exception& error) {
    std::error_code ignored;
    fs::remove_all(temporary, ignored);
    throw Error("checkpoint of step " + std::to_string(step) + " was not saved: " + error.what());
  }
  return target.string();
}

void RunFolder::mark_latest(std::int64_t step) const {
  write_file(path_ + "/checkpoints/latest", checkpoint_name(step) + "\n");
}

void RunFolder::mark_best(std::int64_t step) const {
  write_file(path_ + "/checkpoints/best", checkpoint_name(step) + "\n");
}

std::vector<std::string> RunFolder::set_aside_after(std::int64_t step) const {
  const fs::path folder = fs::path(path_) / "checkpoints";
  std::vector<std::string> aside;
  for (const CheckpointInfo& checkpoint : checkpoints()) {
    if (checkpoint.step <= step) break;
    aside.push_back(checkpoint.path + kDamaged);
    fs::remove_all(aside.back());
    fs::rename(checkpoint.path, aside.back());
    if (fs::path(checkpoint.path).filename() == pointer(folder, "best")) fs::remove(folder / "best");
  }
  return aside;
}

void RunFolder::prune(std::int64_t keep, std::int64_t newest) const {
  const std::string best = pointer(fs::path(path_) / "checkpoints", "best");
  std::int64_t seen = 0;
  for (const CheckpointInfo& checkpoint : checkpoints()) {
    if (checkpoint.step > newest) continue;
    if (++seen > keep && fs::path(checkpoint.path).filename() != best) fs::remove_all(checkpoint.path);
  }
}

std::string verify_checkpoint(const std::string& path) {
  const std::string file = path + "/trainer.json";
  if (!fs::is_regular_file(file)) throw Error(file + " is missing");
  Json root;
  try {
    root = Json::parse(read_file(file));
    const std::string expected = root.at("xxh3").get<std::string>();
    root.erase("xxh3");
    const std::string text = root.dump();
    if (checksum(text.data(), text.size()) != expected) throw Error(file + " is corrupt: its checksum does not agree");
    for (const auto& [name, facts] : root.at("files").items()) {
      const std::string each = path + "/" + name;
      if (!fs::is_regular_file(each)) throw Error(each + " is missing");
      const MappedFile content(each);
      const auto bytes = facts.at("bytes").get<std::uint64_t>();
      if (content.size() != bytes) {
        throw Error(each + " is truncated or changed: " + std::to_string(content.size()) + " bytes, " +
                    std::to_string(bytes) + " when it was saved");
      }
      if (checksum(content.data(), content.size()) != facts.at("xxh3").get<std::string>()) {
        throw Error(each + " is corrupt: its checksum does not agree");
      }
    }
    return root.at("progress").dump();
  } catch (const Json::exception& error) {
    throw Error(file + " is corrupt: " + json_reason(error));
  }
}

namespace {

// For the error's end: a folder in this one that is a model or a run; empty where there is none.
std::string model_below(const fs::path& folder) {
  std::vector<std::string> found;
  std::error_code unreadable;
  for (const auto& entry : fs::directory_iterator(folder, unreadable)) {
    if (fs::is_regular_file(entry.path() / "config.json") || fs::is_directory(entry.path() / "checkpoints")) {
      found.push_back(entry.path().string());
    }
  }
  return found.empty() ? "" : "; did you mean " + *std::min_element(found.begin(), found.end()) + "?";
}

}  // namespace

std::string find_model_folder(const std::string& path, const std::string& which) {
  const fs::path given(path);
  if (fs::is_regular_file(given / "config.json")) return path;
  const fs::path folder = given / "checkpoints";
  if (!fs::is_directory(folder)) {
    throw Error(path + ": neither a model (no config.json) nor a run of `flashgla train` (no checkpoints)" +
                model_below(given));
  }
  std::string name = which;
  if (which == "latest" || which == "best") {
    name = pointer(folder, which.c_str());
    const auto all = RunFolder(path).checkpoints();
    if (all.empty()) throw Error(path + ": the run has no checkpoint yet");
    if (name.empty() && which == "latest") name = fs::path(all.front().path).filename().string();
    if (name.empty()) throw Error(path + ": the run has no best checkpoint: it was never evaluated");
  }
  if (!fs::is_regular_file(folder / name / "config.json")) {
    std::string there;
    for (const CheckpointInfo& one : RunFolder(path).checkpoints()) {
      there += (there.empty() ? "; there are: " : ", ") + fs::path(one.path).filename().string();
    }
    throw Error(path + ": there is no checkpoint '" + name + "'" + there);
  }
  return (folder / name).string();
}

}  // namespace flashgla::train
