// Regular expressions of tokenizer.json. They are written for Oniguruma; PCRE2 runs them, after a translation of what
// the two spell differently. What has no translation is refused by name.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace flashgla::text::huggingface {

// What a search needs besides the expression: one for each thread that searches.
class MatchMemory {
 public:
  MatchMemory();
  ~MatchMemory();
  MatchMemory(MatchMemory&&) noexcept;
  MatchMemory& operator=(MatchMemory&&) noexcept;

 private:
  friend class Regex;
  struct State;
  std::unique_ptr<State> state_;
};

struct Span {
  std::size_t begin, end;
  bool match;
};

// Immutable: threads may share it.
class Regex {
 public:
  // `place` is what errors name. Throws Error when the pattern is wrong, or uses what is not supported.
  Regex(const std::string& pattern, const std::string& place);
  ~Regex();
  Regex(Regex&&) noexcept;

  // The whole of a text that is valid UTF-8 and not empty, cut into matches and what lies between them. An empty match
  // is a span of its own, unless it touches the match before.
  void cut(std::string_view text, MatchMemory& memory, std::vector<Span>& spans) const;

 private:
  // False: there is none at or after `from`.
  bool find(std::string_view text, std::size_t from, MatchMemory& memory, std::size_t& begin, std::size_t& end) const;

  struct Code;
  std::unique_ptr<Code> code_;
  std::string place_;
};

// The pattern as PCRE2 takes it.
std::string translate_pattern(const std::string& pattern, const std::string& place);

}  // namespace flashgla::text::huggingface
