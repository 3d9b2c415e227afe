// What evaluations share: results come from the log or are made, and somebody watches.
#pragma once

#include <nlohmann/json.hpp>

#include "flashgla/base/error.h"
#include "flashgla/eval/evaluation.h"

namespace flashgla::eval {

// The result of job `number`, from the log or from `run`. What the model does not do is told with its name.
template <class Run>
nlohmann::json result_of(const Work& work, std::int64_t number, Run&& run) {
  if (const std::string* known = work.log.find(work.first_job + number)) return nlohmann::json::parse(*known);
  nlohmann::json result;
  try {
    result = run();
  } catch (const Error& error) {
    throw Error(work.name.empty() ? error.what() : work.name + ": " + error.what());
  }
  work.log.record(work.first_job + number, result.dump());
  return result;
}

inline bool goes_on(const Work& work, std::int64_t done, std::int64_t total, double figure) {
  return !work.monitor || work.monitor(done, total, figure);
}

}  // namespace flashgla::eval
