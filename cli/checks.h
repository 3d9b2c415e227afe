// Checks of flag values whose messages say what is allowed.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <string_view>

#include "flashgla/base/error.h"
#include "flashgla/base/names.h"
#include "flashgla/base/quantities.h"
#include "flashgla/base/threads.h"

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

// Whole numbers in [low, high], written as the training fields are ("8192", "10k", "1e6"); for Option::transform.
inline CLI::Validator count_between(std::int64_t low, std::int64_t high, const std::string& words) {
  return CLI::Validator(
      [=](std::string& text) -> std::string {
        try {
          const std::int64_t value = parse_count(text);
          if (value >= low && value <= high) {
            text = std::to_string(value);
            return {};
          }
        } catch (const Error&) {
        }
        return "must be " + words + ", not '" + text + "'";
      },
      "");
}

constexpr std::int64_t kMostCount = 1000000000000000;  // 1e15
inline CLI::Validator positive_count() { return count_between(1, kMostCount, "a whole number from 1 to 1e15"); }
inline CLI::Validator count_or_zero() { return count_between(0, kMostCount, "a whole number from 0 to 1e15"); }
inline CLI::Validator seed_number() { return count_between(0, std::int64_t{1} << 53, "a whole number from 0 to 2^53"); }
inline CLI::Validator thread_count() {
  return count_between(0, kMostThreads, "0 (all) or at most " + std::to_string(kMostThreads));
}

inline CLI::Validator positive_number() { return number_between(1e-300, 1e300, "a positive number"); }
inline CLI::Validator non_negative_number() { return number_between(0.0, 1e300, "0 or a positive number"); }

// A dtype that weights may have in memory.
inline CLI::Validator floating_dtype() {
  return CLI::Validator(
      [](std::string& name) -> std::string {
        try {
          const DType dtype = dtype_from_name(name);
          if (dtype == DType::f32 || dtype == DType::bf16) return {};
        } catch (const Error&) {
        }
        return "is " + name + "; expected f32 or bf16";
      },
      "");
}

// What a shell cannot easily pass: \n, \t, \r and \\ in a flag's value.
inline std::string unescaped(const std::string& text) {
  std::string plain;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const std::size_t known =
        text[i] == '\\' && i + 1 < text.size() ? std::string_view("ntr\\").find(text[i + 1]) : std::string_view::npos;
    plain += known == std::string_view::npos ? text[i] : "\n\t\r\\"[known];
    if (known != std::string_view::npos) ++i;
  }
  return plain;
}

}  // namespace flashgla::cli
