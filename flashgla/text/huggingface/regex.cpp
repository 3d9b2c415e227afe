#include "flashgla/text/huggingface/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <array>
#include <utility>

#include "flashgla/base/error.h"
#include "flashgla/text/huggingface/unicode.h"

namespace flashgla::text::huggingface {
namespace {

constexpr std::size_t kJitStack = std::size_t{32} << 10, kLargestJitStack = std::size_t{8} << 20;

constexpr std::array<std::pair<std::string_view, std::string_view>, 16> kLongCategories = {{{"Letter", "L"},
                                                                                            {"Uppercase_Letter", "Lu"},
                                                                                            {"Lowercase_Letter", "Ll"},
                                                                                            {"Titlecase_Letter", "Lt"},
                                                                                            {"Modifier_Letter", "Lm"},
                                                                                            {"Other_Letter", "Lo"},
                                                                                            {"Mark", "M"},
                                                                                            {"Number", "N"},
                                                                                            {"Decimal_Number", "Nd"},
                                                                                            {"Letter_Number", "Nl"},
                                                                                            {"Other_Number", "No"},
                                                                                            {"Punctuation", "P"},
                                                                                            {"Punct", "P"},
                                                                                            {"Symbol", "S"},
                                                                                            {"Separator", "Z"},
                                                                                            {"Other", "C"}}};
constexpr std::array<std::string_view, 8> kProperties = {"Alphabetic", "Lowercase", "Uppercase",   "White_Space",
                                                         "Any",        "Emoji",     "Ideographic", "Dash"};

class Translator {
 public:
  Translator(const std::string& pattern, const std::string& place) : pattern_(pattern), place_(place) {}

  std::string run() {
    while (at_ < pattern_.size()) {
      const char c = pattern_[at_];
      if (c == '\\') {
        escape(/*in_class=*/false);
      } else if (c == '[') {
        out_ += '[';
        ++at_;
        if (peek() == '^') out_ += pattern_[at_++];
        char_class();
        out_ += ']';
      } else if (c == '(' && peek(1) == '?') {
        group();
      } else if (c == '{') {
        interval();
      } else {
        out_ += c;
        ++at_;
      }
    }
    return std::move(out_);
  }

 private:
  char peek(std::size_t ahead = 0) const { return at_ + ahead < pattern_.size() ? pattern_[at_ + ahead] : '\0'; }

  [[noreturn]] void refuse(const std::string& what) const {
    throw Error(place_ + ": the pattern " + pattern_ + " has " + what + ", which is not supported");
  }

  // At a backslash.
  void escape(bool in_class) {
    const char c = peek(1);
    at_ += 2;
    switch (c) {
      case '\0':
        refuse("a backslash at its end");
      case 's':
        out_ += "\\p{White_Space}";
        return;
      case 'S':
        out_ += "\\P{White_Space}";
        return;
      case 'd':
        out_ += "\\p{Nd}";
        return;
      case 'D':
        out_ += "\\P{Nd}";
        return;
      case 'w':
      case 'W': {
        if (c == 'W' && in_class) refuse("\\W in a character class");
        const std::string words = "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}";
        out_ += in_class ? words : (c == 'w' ? "[" : "[^") + words + "]";
        return;
      }
      case 'h':
        out_ += in_class ? "0-9a-fA-F" : "[0-9a-fA-F]";
        return;
      case 'p':
      case 'P':
        property(c);
        return;
      case 'u':
        out_ += "\\x{" + pattern_.substr(at_, 4) + "}";
        at_ += 4;
        return;
      default:
        if (std::string_view("bBGKHRXkgNOyYcCM").find(c) != std::string_view::npos) refuse(std::string("\\") + c);
        out_ += '\\';
        out_ += c;
    }
  }

  // After \p or \P.
  void property(char letter) {
    const std::size_t close = pattern_.find('}', at_);
    if (peek() != '{' || close == std::string::npos) refuse("\\p without a name in braces");
    std::string name = pattern_.substr(at_ + 1, close - at_ - 1);
    at_ = close + 1;
    std::string negation;
    if (name.starts_with('^')) negation = "^", name.erase(0, 1);
    for (const auto& [word, category] : kLongCategories) {
      if (name == word) name = category;
    }
    // PCRE2 takes a script's name for Script_Extensions; Oniguruma means the script itself.
    const bool known = name.size() <= 2 || std::find(kProperties.begin(), kProperties.end(), name) != kProperties.end();
    out_ += std::string("\\") + letter + "{" + negation + (known ? "" : "sc:") + name + "}";
  }

  // The members of a class up to its closing bracket, which it passes. Classes inside are a union.
  void char_class() {
    if (peek() == ']') refuse("an empty character class");
    while (true) {
      const char c = peek();
      if (at_ >= pattern_.size()) refuse("a character class without an end");
      if (c == ']') {
        ++at_;
        return;
      }
      if (c == '\\') {
        escape(/*in_class=*/true);
      } else if (c == '[') {
        if (peek(1) == ':') refuse("a POSIX bracket");
        if (peek(1) == '^') refuse("a negated class in a class");
        ++at_;
        char_class();
      } else if (c == '&' && peek(1) == '&') {
        refuse("an intersection of classes");
      } else {
        out_ += c;
        ++at_;
      }
    }
  }

  // At "(?".
  void group() {
    const std::size_t end = pattern_.find_first_not_of("imx-", at_ + 2);
    if (end != std::string::npos && end > at_ + 2 && (pattern_[end] == ':' || pattern_[end] == ')')) {
      out_ += "(?";
      for (std::size_t i = at_ + 2; i < end; ++i) out_ += pattern_[i] == 'm' ? 's' : pattern_[i];  // . takes newlines
      at_ = end;
      return;
    }
    for (const char* kind : {"(?:", "(?=", "(?!", "(?>", "(?<=", "(?<!"}) {
      if (pattern_.compare(at_, std::string_view(kind).size(), kind) == 0) {
        out_ += kind;
        at_ += std::string_view(kind).size();
        return;
      }
    }
    refuse("the group " + pattern_.substr(at_, 4));
  }

  // At a brace: {n}, {n,}, {,n}, {n,m}, or a brace that stands for itself.
  void interval() {
    const std::size_t close = pattern_.find('}', at_);
    const std::string inside = close == std::string::npos ? "" : pattern_.substr(at_ + 1, close - at_ - 1);
    const bool counts =
        !inside.empty() && inside != "," && inside.find_first_not_of("0123456789,") == std::string::npos;
    if (!counts) {
      out_ += "\\{";
      ++at_;
      return;
    }
    out_ += "{" + std::string(inside.starts_with(',') ? "0" : "") + inside + "}";
    at_ = close + 1;
    if (peek() == '+') refuse("+ after an interval");
  }

  const std::string& pattern_;
  const std::string& place_;
  std::size_t at_ = 0;
  std::string out_;
};

// Whether a translated pattern is one character class: \p{..}, \P{..} or [..].
bool is_one_class(std::string_view pattern) {
  if (pattern.starts_with("\\p{") || pattern.starts_with("\\P{")) return pattern.find('}') == pattern.size() - 1;
  if (!pattern.starts_with('[')) return false;
  for (std::size_t i = 1; i < pattern.size(); ++i) {
    if (pattern[i] == '\\') {
      ++i;
    } else if (pattern[i] == ']') {
      return i == pattern.size() - 1;
    }
  }
  return false;
}

// A class with +$ alone (\s+$, say) would be tried from every character of a run that ends elsewhere: quadratic in the
// run's length. Every match of it begins where a run does, since behind the last end of a line in a run there is none.
std::string in_linear_time(std::string pattern) {
  if (!pattern.ends_with("+$")) return pattern;
  const std::string one = pattern.substr(0, pattern.size() - 2);
  return is_one_class(one) ? "(?<!" + one + ")" + pattern : pattern;
}

std::string message_of(int error) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(error, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

}  // namespace

struct MatchMemory::State {
  pcre2_match_data* data = pcre2_match_data_create(1, nullptr);
  pcre2_match_context* context = pcre2_match_context_create(nullptr);
  pcre2_jit_stack* stack = pcre2_jit_stack_create(kJitStack, kLargestJitStack, nullptr);

  State() {
    if (data == nullptr || context == nullptr) throw Error("tokenizer: no memory for a search");
    if (stack != nullptr) pcre2_jit_stack_assign(context, nullptr, stack);
  }
  ~State() {
    pcre2_match_data_free(data);
    pcre2_match_context_free(context);
    pcre2_jit_stack_free(stack);
  }
};

MatchMemory::MatchMemory() : state_(std::make_unique<State>()) {}
MatchMemory::~MatchMemory() = default;
MatchMemory::MatchMemory(MatchMemory&&) noexcept = default;
MatchMemory& MatchMemory::operator=(MatchMemory&&) noexcept = default;

struct Regex::Code {
  pcre2_code* compiled = nullptr;
  bool jit = false;
  ~Code() { pcre2_code_free(compiled); }
};

std::string translate_pattern(const std::string& pattern, const std::string& place) {
  return in_linear_time(Translator(pattern, place).run());
}

Regex::Regex(const std::string& pattern, const std::string& place) : code_(std::make_unique<Code>()), place_(place) {
  const std::string translated = translate_pattern(pattern, place);
  int error = 0;
  PCRE2_SIZE offset = 0;
  const std::unique_ptr<pcre2_compile_context, decltype(&pcre2_compile_context_free)> context(
      pcre2_compile_context_create(nullptr), &pcre2_compile_context_free);
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  code_->compiled =
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                    PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NO_AUTO_CAPTURE, &error, &offset, context.get());
  if (code_->compiled == nullptr) throw Error(place + ": the pattern " + pattern + " is wrong: " + message_of(error));
  code_->jit = pcre2_jit_compile(code_->compiled, PCRE2_JIT_COMPLETE) == 0;
}

Regex::~Regex() = default;
Regex::Regex(Regex&&) noexcept = default;

bool Regex::find(std::string_view text, std::size_t from, MatchMemory& memory, std::size_t& begin,
                 std::size_t& end) const {
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  MatchMemory::State& state = *memory.state_;
  int result = PCRE2_ERROR_JIT_STACKLIMIT;
  if (code_->jit) {
    result = pcre2_jit_match(code_->compiled, subject, text.size(), from, 0, state.data, state.context);
  }
  if (result == PCRE2_ERROR_JIT_STACKLIMIT) {
    result = pcre2_match(code_->compiled, subject, text.size(), from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, state.data,
                         state.context);
  }
  if (result == PCRE2_ERROR_NOMATCH) return false;
  if (result < 0)
    throw Error(place_ + ": searching a text of " + std::to_string(text.size()) +
                " bytes failed: " + message_of(result));
  const PCRE2_SIZE* ovector = pcre2_get_ovector_pointer(state.data);
  begin = ovector[0];
  end = ovector[1];
  return true;
}

void Regex::cut(std::string_view text, MatchMemory& memory, std::vector<Span>& spans) const {
  std::size_t from = 0, done = 0, begin = 0, end = 0;
  bool any = false;
  while (from <= text.size() && find(text, from, memory, begin, end)) {
    if (begin == end && any && end == done) {  // an empty match that touches the one before
      from += from < text.size() ? character_at(text, from).length : 1;
      continue;
    }
    if (begin != done) spans.push_back({done, begin, false});
    spans.push_back({begin, end, true});
    from = done = end;
    any = true;
  }
  if (done != text.size()) spans.push_back({done, text.size(), false});
}

}  // namespace flashgla::text::huggingface
