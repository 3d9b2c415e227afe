// The results of an evaluation's jobs, one JSON line each, kept in a file as they come: an evaluation that was
// interrupted goes on from there.
#pragma once

#include <cstdint>
#include <fstream>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace flashgla::eval {

class JobLog {
 public:
  // `settings` says what is evaluated and how; the file begins with it. resume: results of a file with the same
  // settings are taken; without it a file that exists is an Error. An empty path: nothing is written.
  JobLog(std::string path, const std::string& settings, bool resume);

  // The result of a job as JSON text; null: not done yet.
  const std::string* find(std::int64_t job) const;
  // Appends a result (a JSON object on one line), and hands it to the system at once.
  void record(std::int64_t job, const std::string& result);
  std::size_t taken() const { return taken_; }  // found in the file

 private:
  std::string path_;
  std::ofstream file_;
  std::map<std::int64_t, std::string> results_;
  std::size_t taken_ = 0;
};

}  // namespace flashgla::eval
