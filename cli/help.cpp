#include "cli/help.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <sstream>
#include <string>

#include "cli/terminal.h"

namespace flashgla::cli {

namespace {

// `text` in lines of at most `width` characters; lines that begin with a space (examples) are left as they are.
std::string wrapped(const std::string& text, std::size_t width) {
  std::istringstream lines(text);
  std::string result, line, word;
  while (std::getline(lines, line)) {
    if (!result.empty()) result += '\n';
    if (line.starts_with(' ') || line.size() <= width) {
      result += line;
      continue;
    }
    std::istringstream words(line);
    for (std::size_t used = 0; words >> word; used += word.size()) {
      if (used > 0 && used + 1 + word.size() > width) {
        result += '\n';
        used = 0;
      } else if (used > 0) {
        result += ' ';
        ++used;
      }
      result += word;
    }
  }
  return result;
}

std::string first_sentence(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text.substr(0, std::min(text.find(". "), text.find("; ")));
}

class HelpFormatter : public CLI::Formatter {
 public:
  HelpFormatter() : columns_(std::clamp(terminal_columns(STDOUT_FILENO, kMost), kLeast, kMost)) {}

  std::string make_description(const CLI::App* app) const override {
    return wrapped(CLI::Formatter::make_description(app), columns_) + "\n";
  }
  std::string make_option_desc(const CLI::Option* option) const override {
    return wrapped(CLI::Formatter::make_option_desc(option), columns_ - get_column_width());
  }
  std::string make_subcommand(const CLI::App* verb) const override {
    std::ostringstream out;
    const std::string sentence = first_sentence(verb->get_description());
    CLI::detail::format_help(out, verb->get_name(), wrapped(sentence, columns_ - kVerb), kVerb);
    return out.str();
  }

 private:
  static constexpr int kLeast = 60, kMost = 120;
  static constexpr std::size_t kVerb = 12;  // columns of a verb's name
  std::size_t columns_;
};

}  // namespace

std::shared_ptr<CLI::Formatter> help_formatter() { return std::make_shared<HelpFormatter>(); }

}  // namespace flashgla::cli
