// JSON that somebody else wrote, and that names what he wrote. Header only: base itself needs no JSON library.
#pragma once

#include <exception>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "flashgla/base/error.h"

namespace flashgla {

// What a JSON library's exception says, without its own number in front ("[json.exception.parse_error.101] ").
inline std::string json_reason(const std::exception& error) {
  const std::string text = error.what();
  const std::size_t end = text.starts_with("[") ? text.find("] ") : std::string::npos;
  return end == std::string::npos ? text : text.substr(end + 2);
}

// A value as text, indented unless negative. Names of files and what users typed need not be UTF-8, which JSON is:
// other bytes are replaced.
template <class Json>
std::string json_text(const Json& value, int indentation = -1) {
  return value.dump(indentation, ' ', false, Json::error_handler_t::replace);
}

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
    throw Error(source + ": not JSON (" + json_reason(error) + ")");
  }
}

}  // namespace flashgla
