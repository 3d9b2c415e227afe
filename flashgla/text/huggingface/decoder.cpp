#include "flashgla/text/huggingface/decoder.h"

#include "flashgla/text/huggingface/unicode.h"

namespace flashgla::text::huggingface {
namespace {

// <0x41> as 0x41; -1: another token.
int byte_token(const std::string& token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
  int value = 0;
  for (const char c : {token[3], token[4]}) {
    const int digit = c >= '0' && c <= '9'   ? c - '0'
                      : c >= 'A' && c <= 'F' ? c - 'A' + 10
                      : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                             : -1;
    if (digit < 0) return -1;
    value = value * 16 + digit;
  }
  return value;
}

std::string replaced(const std::string& text, const std::string& what, const std::string& by) {
  std::string out;
  std::size_t done = 0;
  for (std::size_t at = text.find(what); at != std::string::npos; at = text.find(what, done)) {
    out.append(text, done, at - done);
    out += by;
    done = at + what.size();
  }
  return out.append(text, done);
}

void byte_level(std::string& token) {
  std::string bytes;
  for (std::size_t i = 0; i < token.size();) {
    const Character character = character_at(token, i);
    const int byte = byte_of_character(character.code);
    if (byte < 0) return;  // such a token is text
    bytes += static_cast<char>(byte);
    i += character.length;
  }
  token = std::move(bytes);
}

}  // namespace

Decoder::Decoder(const Part& part) : spaces_between_(false) {
  bool fused = false;
  read(part, fused);
}

void Decoder::read(const Part& part, bool& fused) {
  const std::string type = part.type();
  if (fused && type != "Strip") part.refuse("the decoder " + type + " after Fuse is not supported");
  Step step{};
  if (type == "Sequence") {
    for (const Part& member : part.elements("decoders")) read(member, fused);
    return;
  }
  if (type == "Fuse") {
    fused = true;
    return;
  }
  if (type == "ByteLevel") {
    step.kind = Step::Kind::byte_level;
    fused = true;
  } else if (type == "ByteFallback") {
    step.kind = Step::Kind::byte_fallback;
  } else if (type == "Replace") {
    const Part pattern = part.at("pattern");
    step.by = part.text("content");
    if (pattern.has("Regex")) {
      step.kind = Step::Kind::replace_pattern;
      step.regex.emplace(pattern.text("Regex"), part.place());
    } else {
      step.kind = Step::Kind::replace_text;
      step.what = pattern.text("String");
      if (step.what.empty()) pattern.refuse("an empty string to replace");
    }
  } else if (type == "Metaspace") {
    step.kind = Step::Kind::metaspace;
    step.what = part.text("replacement");
    step.drops = part.text("prepend_scheme", "always") != "never" && part.flag("add_prefix_space", true);
  } else if (type == "Strip") {
    step.kind = fused ? Step::Kind::drop_first : Step::Kind::strip;
    step.what = part.text("content");
    step.start = part.integer("start");
    step.stop = part.integer("stop");
    if (fused && (step.start > 1 || step.stop != 0)) {
      part.refuse("Strip after Fuse of more than one character at the start is not supported");
    }
    if (fused && step.start == 0) return;
  } else {
    part.refuse("the decoder " + type + " is not supported");
  }
  steps_.push_back(std::move(step));
}

std::string Decoder::text_of(std::string token, bool first) const {
  if (spaces_between_) return first ? token : " " + token;
  for (const Step& step : steps_) {
    if (!apply(step, token, first)) {  // a byte: only what drops the text's first character still sees it
      for (const Step& last : steps_) {
        if (last.kind == Step::Kind::drop_first) apply(last, token, first);
      }
      break;
    }
  }
  return token;
}

bool Decoder::apply(const Step& step, std::string& token, bool first) {
  switch (step.kind) {
    case Step::Kind::byte_level:
      byte_level(token);
      return true;
    case Step::Kind::byte_fallback: {
      const int byte = byte_token(token);
      if (byte < 0) return true;
      token = static_cast<char>(byte);
      return false;
    }
    case Step::Kind::replace_text:
      token = replaced(token, step.what, step.by);
      return true;
    case Step::Kind::replace_pattern: {
      if (token.empty()) return true;
      MatchMemory memory;
      std::vector<Span> spans;
      step.regex->cut(token, memory, spans);
      std::string out;
      for (const Span& span : spans) out += span.match ? step.by : token.substr(span.begin, span.end - span.begin);
      token = std::move(out);
      return true;
    }
    case Step::Kind::strip:
      for (std::int64_t i = 0; i < step.start && token.starts_with(step.what); ++i) token.erase(0, step.what.size());
      for (std::int64_t i = 0; i < step.stop && token.ends_with(step.what); ++i) {
        token.erase(token.size() - step.what.size());
      }
      return true;
    case Step::Kind::metaspace:
      token = replaced(token, step.what, first && step.drops ? "" : " ");
      return true;
    case Step::Kind::drop_first:
      if (first && token.starts_with(step.what)) token.erase(0, step.what.size());
      return true;
  }
  return true;
}

}  // namespace flashgla::text::huggingface
