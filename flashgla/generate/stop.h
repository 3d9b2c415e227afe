// Stop strings over text that arrives in pieces: matched across the pieces' boundaries and never let through.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace flashgla::generate {

class StopMatcher {
 public:
  // Throws Error when a stop string is empty.
  explicit StopMatcher(std::vector<std::string> stops);

  // Takes the next piece and returns what may be shown: everything but an end that could be the beginning of a stop
  // string. Once a stop string is complete, the text before its first occurrence (of the stop string that ends first;
  // of those the longest) is returned, stopped() is true and later pieces are swallowed.
  std::string push(std::string_view piece);

  // No more text comes: what was held back.
  std::string finish();

  bool stopped() const { return stopped_; }
  void reset();

 private:
  std::vector<std::string> stops_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace flashgla::generate
