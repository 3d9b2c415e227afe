#include "flashgla/ops/matmul/choices.h"

#include <bit>
#include <cinttypes>
#include <cstdio>
#include <filesystem>
#include <sstream>

#include "flashgla/base/error.h"
#include "flashgla/base/file.h"

namespace flashgla::ops::matmul {

namespace {

constexpr const char* kFormat = "flashgla products 1";
constexpr const char* kSeparator = " = ";

// FNV-1a.
std::uint64_t checksum_of(std::string_view text) {
  std::uint64_t sum = 0xcbf29ce484222325ull;
  for (const char c : text) sum = (sum ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return sum;
}

std::string hexadecimal(std::uint64_t value) {
  char digits[17];
  std::snprintf(digits, sizeof(digits), "%016" PRIx64, value);
  return digits;
}

[[noreturn]] void fail(const std::string& what) { throw Error("choices of products: " + what); }

}  // namespace

std::string to_text(const Choices& choices) {
  std::string text = std::string(kFormat) + "\n" + choices.made_by + "\n";
  for (const auto& [product, choice] : choices.by_product) {
    text += product;
    text += kSeparator;
    for (const std::uint64_t word : choice.algorithm) text.append(hexadecimal(word)).append(" ");
    text.append(hexadecimal(std::bit_cast<std::uint64_t>(choice.microseconds))).append("\n");
  }
  return text.append(hexadecimal(checksum_of(text))).append("\n");
}

Choices choices_from_text(std::string_view text) {
  constexpr std::size_t kLastLine = 17;
  if (text.size() < kLastLine || text.back() != '\n') fail("cut short");
  const std::string_view content = text.substr(0, text.size() - kLastLine);
  if (text.substr(content.size(), kLastLine - 1) != hexadecimal(checksum_of(content))) {
    fail("damaged (its checksum differs)");
  }
  std::istringstream lines{std::string(content)};
  std::string line;
  if (!std::getline(lines, line) || line != kFormat) fail("of another format, '" + line + "'");
  Choices choices;
  std::getline(lines, choices.made_by);
  while (std::getline(lines, line)) {
    const std::size_t at = line.find(kSeparator);
    if (at == std::string::npos) fail("line '" + line + "' has no algorithm");
    std::istringstream words(line.substr(at + std::string_view(kSeparator).size()));
    Choice choice;
    std::uint64_t microseconds = 0;
    words >> std::hex;
    for (std::uint64_t& word : choice.algorithm) words >> word;
    words >> microseconds;
    if (!words) fail("line '" + line + "' is not nine numbers");
    choice.microseconds = std::bit_cast<double>(microseconds);
    choices.by_product[line.substr(0, at)] = choice;
  }
  return choices;
}

Choices add_to_file(const std::string& path, const Choices& choices) {
  const FileLock lock(path + ".lock");
  Choices all;
  try {
    if (std::filesystem::exists(path)) all = choices_from_text(read_file(path));
  } catch (const Error&) {
    all = Choices{};
  }
  all.made_by = choices.made_by;
  for (const auto& [product, choice] : choices.by_product) {
    if (choice.microseconds > 0.0) all.by_product.emplace(product, choice);
  }
  write_file(path, to_text(all));
  return all;
}

}  // namespace flashgla::ops::matmul
