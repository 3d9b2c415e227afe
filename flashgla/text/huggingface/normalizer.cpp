#include "flashgla/text/huggingface/normalizer.h"

#include <optional>

#include "flashgla/text/huggingface/charsmap.h"
#include "flashgla/text/huggingface/unicode.h"

namespace flashgla::text::huggingface {
namespace {

class UnicodeForm final : public Normalizer {
 public:
  explicit UnicodeForm(Form form) : form_(form) {}
  bool apply(std::string& text, MatchMemory&) const override {
    text = normalized(text, form_);
    return true;
  }

 private:
  Form form_;
};

// Character by character: `change` appends what becomes of one, or nothing.
class Characters final : public Normalizer {
 public:
  using Change = void (*)(std::string&, CodePoint);
  explicit Characters(Change change) : change_(change) {}
  bool apply(std::string& text, MatchMemory&) const override {
    std::string out;
    out.reserve(text.size());
    bool keeps_first = true;
    for (std::size_t i = 0; i < text.size();) {
      const Character character = character_at(text, i);
      change_(out, character.code);
      if (i == 0) keeps_first = !out.empty();
      i += character.length;
    }
    text = std::move(out);
    return keeps_first;
  }

 private:
  Change change_;
};

void strip_accent(std::string& out, CodePoint code) {
  if (!is_mark(code)) append(out, code);
}

// The rules of neural machine translation's normaliser: control characters go, odd spaces become spaces.
void nmt(std::string& out, CodePoint code) {
  const auto within = [&](CodePoint low, CodePoint high) { return code >= low && code <= high; };
  if (within(1, 8) || code == 0x0B || within(0x0E, 0x1F) || code == 0x7F || code == 0x8F || code == 0x9F) return;
  const bool space = code == '\t' || code == '\n' || code == '\f' || code == '\r' || code == 0x1680 ||
                     within(0x200B, 0x200F) || code == 0x2028 || code == 0x2029 || code == 0x2581 || code == 0xFEFF ||
                     code == 0xFFFD;
  append(out, space ? ' ' : code);
}

void byte_characters(std::string& out, CodePoint code) {
  std::string bytes;
  append(bytes, code);
  append_byte_characters(out, bytes);
}

class Strip final : public Normalizer {
 public:
  Strip(bool left, bool right) : left_(left), right_(right) {}
  bool apply(std::string& text, MatchMemory&) const override {
    std::size_t begin = 0, end = text.size();
    while (left_ && begin < end) {
      const Character character = character_at(text, begin);
      if (!is_whitespace(character.code)) break;
      begin += character.length;
    }
    while (right_ && end > begin) {
      const Character character = last_character(std::string_view(text).substr(begin, end - begin));
      if (!is_whitespace(character.code)) break;
      end -= character.length;
    }
    text = text.substr(begin, end - begin);
    return begin == 0;
  }

 private:
  bool left_, right_;
};

class Prepend final : public Normalizer {
 public:
  explicit Prepend(std::string what) : what_(std::move(what)) {}
  bool apply(std::string& text, MatchMemory&) const override {
    if (!text.empty()) text.insert(0, what_);
    return true;
  }

 private:
  std::string what_;
};

class ReplaceText final : public Normalizer {
 public:
  ReplaceText(std::string what, std::string by) : what_(std::move(what)), by_(std::move(by)) {}
  bool apply(std::string& text, MatchMemory&) const override {
    std::size_t at = text.find(what_);
    if (at == std::string::npos) return true;
    std::string out;
    out.reserve(text.size() * 2);
    std::size_t done = 0;
    for (; at != std::string::npos; at = text.find(what_, done)) {
      out.append(text, done, at - done);
      out += by_;
      done = at + what_.size();
    }
    out.append(text, done);
    text = std::move(out);
    return true;
  }

 private:
  std::string what_, by_;
};

class ReplacePattern final : public Normalizer {
 public:
  ReplacePattern(Regex regex, std::string by) : regex_(std::move(regex)), by_(std::move(by)) {}
  bool apply(std::string& text, MatchMemory& memory) const override {
    if (text.empty()) return true;
    std::vector<Span> spans;
    regex_.cut(text, memory, spans);
    std::string out;
    for (const Span& span : spans) out += span.match ? by_ : text.substr(span.begin, span.end - span.begin);
    text = std::move(out);
    return true;
  }

 private:
  Regex regex_;
  std::string by_;
};

class Precompiled final : public Normalizer {
 public:
  explicit Precompiled(Charsmap map) : map_(std::move(map)) {}
  bool apply(std::string& text, MatchMemory&) const override {
    text = map_.apply(text);
    return true;
  }

 private:
  Charsmap map_;
};

}  // namespace

void read_normalizers(const Part& part, std::vector<std::unique_ptr<Normalizer>>& out) {
  const std::string type = part.type();
  if (type == "Sequence") {
    for (const Part& member : part.elements("normalizers")) read_normalizers(member, out);
  } else if (type == "NFC") {
    out.push_back(std::make_unique<UnicodeForm>(Form::nfc));
  } else if (type == "NFD") {
    out.push_back(std::make_unique<UnicodeForm>(Form::nfd));
  } else if (type == "NFKC") {
    out.push_back(std::make_unique<UnicodeForm>(Form::nfkc));
  } else if (type == "NFKD") {
    out.push_back(std::make_unique<UnicodeForm>(Form::nfkd));
  } else if (type == "Lowercase") {
    out.push_back(std::make_unique<Characters>(append_lower));
  } else if (type == "StripAccents") {
    out.push_back(std::make_unique<Characters>(strip_accent));
  } else if (type == "Nmt") {
    out.push_back(std::make_unique<Characters>(nmt));
  } else if (type == "ByteLevel") {
    out.push_back(std::make_unique<Characters>(byte_characters));
  } else if (type == "Strip") {
    out.push_back(std::make_unique<Strip>(part.flag("strip_left", true), part.flag("strip_right", true)));
  } else if (type == "Prepend") {
    out.push_back(std::make_unique<Prepend>(part.text("prepend")));
  } else if (type == "Replace") {
    const Part pattern = part.at("pattern");
    if (pattern.has("Regex")) {
      out.push_back(std::make_unique<ReplacePattern>(Regex(pattern.text("Regex"), part.place()), part.text("content")));
    } else {
      const std::string what = pattern.text("String");
      if (what.empty()) pattern.refuse("an empty string to replace");
      out.push_back(std::make_unique<ReplaceText>(what, part.text("content")));
    }
  } else if (type == "Precompiled") {
    if (!part.has("precompiled_charsmap")) return;
    out.push_back(std::make_unique<Precompiled>(Charsmap(part.text("precompiled_charsmap"), part.place())));
  } else {
    part.refuse("the normalizer " + type + " is not supported");
  }
}

}  // namespace flashgla::text::huggingface
