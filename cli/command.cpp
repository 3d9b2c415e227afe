#include "cli/command.h"

namespace flashgla::cli {

namespace {

std::string& program() {
  static std::string name = "flashgla";
  return name;
}

bool is_plain(unsigned char c) {
  return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c >= 0x80 ||
         std::string_view("_-./,:=+@%").find(static_cast<char>(c)) != std::string_view::npos;
}

std::string in_quotes(std::string_view word) {
  bool plain = !word.empty();
  for (const char c : word) plain = plain && is_plain(static_cast<unsigned char>(c));
  if (plain) return std::string(word);
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

}  // namespace

void set_program(std::string_view name) {
  if (!name.empty()) program() = name;
}

std::string command(std::initializer_list<std::string_view> words) {
  std::string text = in_quotes(program());
  for (const std::string_view word : words) text += " " + in_quotes(word);
  return text;
}

}  // namespace flashgla::cli
