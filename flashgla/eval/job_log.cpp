#include "flashgla/eval/job_log.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "flashgla/base/error.h"
#include "flashgla/base/file.h"

namespace flashgla::eval {

using nlohmann::json;

JobLog::JobLog(std::string path, const std::string& settings, bool resume) : path_(std::move(path)) {
  if (path_.empty()) {
    if (resume) throw Error("evaluate: --resume needs the --log of the evaluation that it goes on from");
    return;
  }
  const bool exists = std::filesystem::exists(path_);
  if (exists && !resume) {
    throw Error(path_ + ": exists; --resume goes on from it, or remove it");
  }
  const json header = {{"settings", json::parse(settings)}};
  std::string kept = header.dump() + "\n";
  if (exists) {
    std::ifstream old(path_);
    std::string line;
    std::getline(old, line);
    const json before = json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (before.is_object() && before.contains("settings") && before != header) {
      for (const auto& [key, value] : header["settings"].items()) {
        if (before["settings"].value(key, json()) != value) {
          throw Error(path_ + ": is of an evaluation with another " + key + ": " +
                      before["settings"].value(key, json()).dump() + ", now " + value.dump());
        }
      }
    }
    // What is no JSON compares as neither equal nor unequal.
    if (!before.is_object() || before != header) throw Error(path_ + ": is not the log of this evaluation");
    while (std::getline(old, line)) {
      const json row = json::parse(line, nullptr, /*allow_exceptions=*/false);
      if (!row.is_object() || !row.contains("job") || !row["job"].is_number_integer() || !row.contains("result")) {
        continue;  // cut off where the evaluation was ended by force
      }
      const std::string result = row["result"].dump();
      if (result.find("null") != std::string::npos) continue;  // infinite, which JSON has no number for
      results_[row["job"].get<std::int64_t>()] = result;
      kept += line + "\n";
    }
  }
  taken_ = results_.size();
  write_file(path_, kept);
  file_.open(path_, std::ios::app);
  if (!file_) throw Error(path_ + ": cannot be written");
}

const std::string* JobLog::find(std::int64_t job) const {
  const auto found = results_.find(job);
  return found == results_.end() ? nullptr : &found->second;
}

void JobLog::record(std::int64_t job, const std::string& result) {
  results_[job] = result;
  if (path_.empty()) return;
  file_ << json{{"job", job}, {"result", json::parse(result)}}.dump() << "\n" << std::flush;
  if (!file_) throw Error(path_ + ": cannot be written; is the disk full?");
}

}  // namespace flashgla::eval
