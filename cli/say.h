// What the program prints. Nothing here throws: a run must not end because nobody reads its messages. What could not be
// written to standard output is told when the program ends (cli/main.cpp).
#pragma once

#include <fmt/core.h>

#include <cstdio>
#include <string>
#include <utility>

namespace flashgla::cli {

// To standard output.
template <class... T>
void print(fmt::format_string<T...> format, T&&... values) {
  const std::string text = fmt::format(format, std::forward<T>(values)...);
  std::fwrite(text.data(), 1, text.size(), stdout);
}

// To standard error: progress, notices.
template <class... T>
void say(fmt::format_string<T...> format, T&&... values) {
  const std::string text = fmt::format(format, std::forward<T>(values)...);
  std::fwrite(text.data(), 1, text.size(), stderr);
}

}  // namespace flashgla::cli
