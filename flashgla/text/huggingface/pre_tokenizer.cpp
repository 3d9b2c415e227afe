#include "flashgla/text/huggingface/pre_tokenizer.h"

#include "flashgla/text/huggingface/unicode.h"

namespace flashgla::text::huggingface {
namespace {

constexpr const char* kGpt2Pattern =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

// What becomes of the matches ("delimiters").
enum class Behavior { removed, isolated, merged_with_previous, merged_with_next, contiguous };

Behavior behavior_of(const Part& part, const std::string& name) {
  if (name == "Removed") return Behavior::removed;
  if (name == "Isolated") return Behavior::isolated;
  if (name == "MergedWithPrevious") return Behavior::merged_with_previous;
  if (name == "MergedWithNext") return Behavior::merged_with_next;
  if (name == "Contiguous") return Behavior::contiguous;
  part.refuse("the behavior " + name + " is not supported");
}

void give(const Piece& piece, std::size_t begin, std::size_t end, std::vector<Piece>& out) {
  if (begin < end) out.push_back({piece.text.substr(begin, end - begin), piece.at_start && begin == 0});
}

void split(const Piece& piece, const std::vector<Span>& spans, Behavior behavior, bool invert,
           std::vector<Piece>& out) {
  switch (behavior) {
    case Behavior::isolated:
      for (const Span& span : spans) give(piece, span.begin, span.end, out);
      return;
    case Behavior::removed:
      for (const Span& span : spans) {
        if (span.match == invert) give(piece, span.begin, span.end, out);
      }
      return;
    default:
      break;
  }
  // The other behaviors join neighbours: joined[i] says that span i goes on from the one before it.
  std::vector<bool> joined(spans.size(), false);
  bool previous = false;
  const auto is_match = [&](std::size_t i) { return spans[i].match != invert; };
  if (behavior == Behavior::merged_with_next) {
    for (std::size_t i = spans.size(); i-- > 0;) {
      if (is_match(i) && !previous && i + 1 < spans.size()) joined[i + 1] = true;
      previous = is_match(i);
    }
  } else {
    for (std::size_t i = 0; i < spans.size(); ++i) {
      joined[i] = i > 0 && (behavior == Behavior::contiguous ? is_match(i) == previous : is_match(i) && !previous);
      previous = is_match(i);
    }
  }
  for (std::size_t i = 0; i < spans.size();) {
    std::size_t last = i;
    while (last + 1 < spans.size() && joined[last + 1]) ++last;
    give(piece, spans[i].begin, spans[last].end, out);
    i = last + 1;
  }
}

class PatternSplit final : public PreTokenizer {
 public:
  PatternSplit(Regex regex, Behavior behavior, bool invert)
      : regex_(std::move(regex)), behavior_(behavior), invert_(invert) {}
  void apply(const Piece& piece, CutMemory& memory, std::vector<Piece>& out) const override {
    memory.spans.clear();
    regex_.cut(piece.text, memory.match, memory.spans);
    split(piece, memory.spans, behavior_, invert_, out);
  }

 private:
  Regex regex_;
  Behavior behavior_;
  bool invert_;
};

// Splits at characters: each that belongs is a match.
class CharacterSplit final : public PreTokenizer {
 public:
  using Belongs = bool (*)(CodePoint);
  CharacterSplit(Belongs belongs, Behavior behavior) : belongs_(belongs), behavior_(behavior) {}
  void apply(const Piece& piece, CutMemory& memory, std::vector<Piece>& out) const override {
    std::vector<Span>& spans = memory.spans;
    spans.clear();
    for (std::size_t i = 0; i < piece.text.size();) {
      const Character character = character_at(piece.text, i);
      if (belongs_(character.code)) {
        spans.push_back({i, i + character.length, true});
      } else if (!spans.empty() && !spans.back().match) {
        spans.back().end += character.length;
      } else {
        spans.push_back({i, i + character.length, false});
      }
      i += character.length;
    }
    split(piece, spans, behavior_, /*invert=*/false, out);
  }

 private:
  Belongs belongs_;
  Behavior behavior_;
};

// Splits at one fixed text.
void cut_at(std::string_view text, std::string_view what, std::vector<Span>& spans) {
  std::size_t done = 0;
  for (std::size_t at = text.find(what); at != std::string_view::npos; at = text.find(what, done)) {
    if (at > done) spans.push_back({done, at, false});
    done = at + what.size();
    spans.push_back({at, done, true});
  }
  if (done < text.size()) spans.push_back({done, text.size(), false});
}

class TextSplit final : public PreTokenizer {
 public:
  TextSplit(std::string what, Behavior behavior, bool invert)
      : what_(std::move(what)), behavior_(behavior), invert_(invert) {}
  void apply(const Piece& piece, CutMemory& memory, std::vector<Piece>& out) const override {
    memory.spans.clear();
    cut_at(piece.text, what_, memory.spans);
    split(piece, memory.spans, behavior_, invert_, out);
  }

 private:
  std::string what_;
  Behavior behavior_;
  bool invert_;
};

class PrefixSpace final : public PreTokenizer {
 public:
  void apply(const Piece& piece, CutMemory& memory, std::vector<Piece>& out) const override {
    if (piece.text.starts_with(' ')) {
      out.push_back(piece);
    } else {
      out.push_back({memory.storage.emplace_back(" " + std::string(piece.text)), piece.at_start});
    }
  }
};

class ByteCharacters final : public PreTokenizer {
 public:
  void apply(const Piece& piece, CutMemory& memory, std::vector<Piece>& out) const override {
    append_byte_characters(memory.storage.emplace_back(), piece.text);
    out.push_back({memory.storage.back(), piece.at_start});
  }
  bool maps_bytes() const override { return true; }
};

class Metaspace final : public PreTokenizer {
 public:
  enum class Prepend { always, first, never };
  Metaspace(std::string replacement, Prepend prepend, bool splits)
      : replacement_(std::move(replacement)), prepend_(prepend), splits_(splits) {}

  void apply(const Piece& piece, CutMemory& memory, std::vector<Piece>& out) const override {
    std::string& text = memory.storage.emplace_back();
    const bool begins = piece.text.starts_with(' ') || piece.text.starts_with(replacement_);
    const bool prepends = !begins && (prepend_ == Prepend::always || (prepend_ == Prepend::first && piece.at_start));
    text.reserve(piece.text.size() * 3 / 2 + replacement_.size());
    if (prepends) text += replacement_;
    for (std::size_t done = 0; done < piece.text.size();) {
      const std::size_t space = piece.text.find(' ', done);
      text += piece.text.substr(done, space - done);
      if (space == std::string_view::npos) break;
      text += replacement_;
      done = space + 1;
    }
    const Piece changed{text, piece.at_start};
    if (!splits_) {
      out.push_back(changed);
      return;
    }
    memory.spans.clear();
    cut_at(text, replacement_, memory.spans);
    split(changed, memory.spans, Behavior::merged_with_next, /*invert=*/false, out);
  }

 private:
  std::string replacement_;
  Prepend prepend_;
  bool splits_;
};

std::unique_ptr<PreTokenizer> read_metaspace(const Part& part) {
  std::string scheme = part.text("prepend_scheme", "always");
  if (!part.flag("add_prefix_space", true)) scheme = "never";
  Metaspace::Prepend prepend{};
  if (scheme == "always") {
    prepend = Metaspace::Prepend::always;
  } else if (scheme == "first") {
    prepend = Metaspace::Prepend::first;
  } else if (scheme == "never") {
    prepend = Metaspace::Prepend::never;
  } else {
    part.refuse("the prepend_scheme " + scheme + " is not supported");
  }
  const std::string replacement = part.text("replacement");
  if (replacement.empty()) part.refuse("replacement is empty");
  return std::make_unique<Metaspace>(replacement, prepend, part.flag("split", true));
}

}  // namespace

void read_pre_tokenizers(const Part& part, std::vector<std::unique_ptr<PreTokenizer>>& out) {
  const std::string type = part.type();
  const auto pattern = [&](const std::string& regex, Behavior behavior, bool invert) {
    out.push_back(std::make_unique<PatternSplit>(Regex(regex, part.place()), behavior, invert));
  };
  if (type == "Sequence") {
    for (const Part& member : part.elements("pretokenizers")) read_pre_tokenizers(member, out);
  } else if (type == "ByteLevel") {
    if (part.flag("add_prefix_space", true)) out.push_back(std::make_unique<PrefixSpace>());
    if (part.flag("use_regex", true)) pattern(kGpt2Pattern, Behavior::isolated, false);
    out.push_back(std::make_unique<ByteCharacters>());
  } else if (type == "Split") {
    const Behavior behavior = behavior_of(part, part.text("behavior"));
    const bool invert = part.flag("invert", false);
    const Part wanted = part.at("pattern");
    if (wanted.has("Regex")) {
      pattern(wanted.text("Regex"), behavior, invert);
    } else {
      const std::string what = wanted.text("String");
      if (what.empty()) wanted.refuse("an empty string to split at");
      out.push_back(std::make_unique<TextSplit>(what, behavior, invert));
    }
  } else if (type == "Metaspace") {
    out.push_back(read_metaspace(part));
  } else if (type == "Whitespace") {
    // \w of Rust's regex takes the joiners besides what Oniguruma's takes.
    pattern("[\\w\\x{200C}\\x{200D}]+|[^\\w\\x{200C}\\x{200D}\\s]+", Behavior::removed, /*invert=*/true);
  } else if (type == "WhitespaceSplit") {
    out.push_back(std::make_unique<CharacterSplit>(is_whitespace, Behavior::removed));
  } else if (type == "Digits") {
    const bool each = part.flag("individual_digits", false);
    out.push_back(std::make_unique<CharacterSplit>(is_numeric, each ? Behavior::isolated : Behavior::contiguous));
  } else if (type == "Punctuation") {
    out.push_back(
        std::make_unique<CharacterSplit>(is_punctuation, behavior_of(part, part.text("behavior", "Isolated"))));
  } else if (type == "CharDelimiterSplit" || type == "Delimiter") {
    out.push_back(std::make_unique<TextSplit>(part.text("delimiter"), Behavior::removed, /*invert=*/false));
  } else {
    part.refuse("the pre-tokenizer " + type + " is not supported");
  }
}

}  // namespace flashgla::text::huggingface
