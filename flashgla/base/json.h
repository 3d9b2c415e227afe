// JSON that somebody else wrote. Header only: base itself needs no JSON library.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "flashgla/base/error.h"

namespace flashgla {

// Parses text; throws Error that begins with `source` when it is no JSON or nested deeper than 100: what prints, copies
// or compares a value calls itself for each level, and a small file could exhaust the stack.
template <class Json>
Json parse_json(const std::string& text, const std::string& source) {
  constexpr int kDeepest = 100;
  const auto check = [&](int depth, typename Json::parse_event_t /*event*/, Json& /*parsed*/) {
    if (depth > kDeepest) throw Error(source + ": nested deeper than " + std::to_string(kDeepest));
    return true;
  };
  try {
    return Json::parse(text, check);
  } catch (const typename Json::exception& error) {
    throw Error(source + ": not JSON (" + error.what() + ")");
  }
}

}  // namespace flashgla
