// Checks of flag values whose messages say what is allowed.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace flashgla::cli {

// Numbers in [low, high]; `words` says so: "a positive number".
inline CLI::Validator number_between(double low, double high, const std::string& words) {
  return CLI::Validator(
      [=](std::string& text) -> std::string {
        double value = 0.0;
        if (!CLI::detail::lexical_cast(text, value) || !(value >= low && value <= high)) {
          return "must be " + words + ", not '" + text + "'";
        }
        return {};
      },
      "");
}

inline CLI::Validator positive_number() { return number_between(1e-300, 1e300, "a positive number"); }
inline CLI::Validator non_negative_number() { return number_between(0.0, 1e300, "0 or a positive number"); }

}  // namespace flashgla::cli
