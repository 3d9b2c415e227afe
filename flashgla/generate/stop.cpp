#include "flashgla/generate/stop.h"

#include <algorithm>

#include "flashgla/base/error.h"

namespace flashgla::generate {

StopMatcher::StopMatcher(std::vector<std::string> stops) : stops_(std::move(stops)) {
  for (const std::string& stop : stops_) {
    if (stop.empty()) throw Error("generation: a stop string is empty");
  }
}

std::string StopMatcher::push(std::string_view piece) {
  if (stopped_) return {};
  held_ += piece;
  // The match that ends first, and of those the one that begins first.
  std::size_t first_end = std::string::npos;
  std::size_t first_begin = std::string::npos;
  for (const std::string& stop : stops_) {
    const std::size_t begin = held_.find(stop);
    if (begin == std::string::npos) continue;
    const std::size_t end = begin + stop.size();
    if (end < first_end || (end == first_end && begin < first_begin)) {
      first_end = end;
      first_begin = begin;
    }
  }
  if (first_end != std::string::npos) {
    stopped_ = true;
    std::string shown = held_.substr(0, first_begin);
    held_.clear();
    return shown;
  }
  std::size_t keep = 0;
  for (const std::string& stop : stops_) {
    for (std::size_t length = std::min(stop.size() - 1, held_.size()); length > keep; --length) {
      if (held_.compare(held_.size() - length, length, stop, 0, length) == 0) keep = length;
    }
  }
  std::string shown = held_.substr(0, held_.size() - keep);
  held_.erase(0, held_.size() - keep);
  return shown;
}

std::string StopMatcher::finish() {
  std::string shown = std::move(held_);
  held_.clear();
  return shown;
}

void StopMatcher::reset() {
  held_.clear();
  stopped_ = false;
}

}  // namespace flashgla::generate
