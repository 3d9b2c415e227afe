// SentencePiece models. libsentencepiece does the segmentation of whole, valid text; what it cannot carry (bytes that
// are not UTF-8, and U+2581, its own sign for a space) goes around it as byte pieces, so that models trained here
// reproduce every text.
#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <mutex>
#include <unordered_map>

#include "flashgla/base/error.h"
#include "flashgla/base/file.h"
#include "flashgla/text/fingerprint.h"
#include "flashgla/text/tokenizer.h"
#include "flashgla/text/utf8.h"

namespace flashgla::text {
namespace {

constexpr std::string_view kSpaceSign = "\xE2\x96\x81";      // U+2581
constexpr std::string_view kUnknownText = " \xE2\x81\x87 ";  // what SentencePiece shows for <unk>

// SentencePiece's own messages carry source positions and conditions before the words that matter.
std::string reason_of(const sentencepiece::util::Status& status) {
  const std::string message = status.ToString();
  const std::size_t bracket = message.rfind("] ");
  const std::string words = bracket == std::string::npos ? message : message.substr(bracket + 2);
  return words.empty() ? message : words;
}

// The size that the library's sentence about a wrong one names; 0: its sentence is about something else.
std::int64_t possible_vocabulary(const std::string& reason) {
  for (const char* before : {"to a value <= ", " vs "}) {
    const std::size_t found = reason.find(before);
    if (found == std::string::npos) continue;
    std::int64_t size = 0;
    const char* begin = reason.data() + found + std::string_view(before).size();
    std::from_chars(begin, reason.data() + reason.size(), size);
    return size;
  }
  return 0;
}

class SentencePieceTokenizer final : public Tokenizer {
 public:
  // `origin` names the model in errors.
  SentencePieceTokenizer(std::string model, const std::string& origin) : model_(std::move(model)) {
    const auto status = processor_.LoadFromSerializedProto(model_);
    if (!status.ok() || processor_.GetPieceSize() == 0) {
      throw Error(origin + " is not a SentencePiece model, or is damaged");
    }
    pieces_.resize(static_cast<std::size_t>(processor_.GetPieceSize()));
    special_.resize(pieces_.size());
    byte_ids_.fill(-1);
    bool newline_in_piece = false;
    bool piece_crosses_words = false;
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      const int id = static_cast<int>(i);
      const std::string& piece = processor_.IdToPiece(id);
      special_[i] = processor_.IsControl(id);
      unsigned byte = 0;
      if (special_[i]) continue;
      if (processor_.IsByte(id) && std::sscanf(piece.c_str(), "<0x%2X>", &byte) == 1) {
        pieces_[i] = static_cast<char>(byte);
        byte_ids_[byte] = id;
      } else if (processor_.IsUnknown(id)) {
        pieces_[i] = kUnknownText;
      } else {
        pieces_[i] = with_spaces(piece);
        newline_in_piece = newline_in_piece || (piece.size() > 1 && piece.find('\n') != std::string::npos);
        const std::string& text = pieces_[i];
        for (std::size_t at = 1; at < text.size(); ++at) {
          piece_crosses_words = piece_crosses_words || (text[at] == ' ' && text[at - 1] != ' ');
        }
      }
    }
    const bool has_bytes = std::all_of(byte_ids_.begin(), byte_ids_.end(), [](int id) { return id >= 0; });
    // Does the model put a space before the text, and drop it when decoding?
    const TokenIds letter = segment("a");
    drops_first_space_ = !letter.empty() && pieces_[static_cast<std::size_t>(letter[0])].starts_with(' ');
    // Whether the model changes texts cannot be asked for, so it is tried on what normalisers do: dummy prefix, runs
    // and ends of spaces, tabs, control characters, composition, compatibility forms, full width, zero width.
    lossless_ = has_bytes;
    for (const std::string_view probe : {" a  b ", "\ta\r\n\n b\n", "a\u0301 \u00E1", "\uFB01 \u2460 \uFF21 \u00BD",
                                         "a\u200Bb\u00ADc\uFEFF", "\x01\x7F\u3000\U0001F600"}) {
      lossless_ = lossless_ && decode(segment(probe)) == probe;
    }
    splits_at_newlines_ = lossless_ && !newline_in_piece;
    splits_at_words_ = lossless_ && !piece_crosses_words;
  }

  std::string_view kind() const override { return "sentencepiece"; }
  std::int64_t vocab_size() const override { return static_cast<std::int64_t>(pieces_.size()); }
  std::int32_t bos_id() const override { return processor_.bos_id(); }
  std::int32_t eos_id() const override { return processor_.eos_id(); }
  bool lossless() const override { return lossless_; }
  bool splits_at_newlines() const override { return splits_at_newlines_; }
  std::string fingerprint() const override { return fingerprint_of(model_); }
  void save(const std::string& folder) const override {
    write_file(std::filesystem::path(folder) / "tokenizer.model", model_);
  }

  bool is_special(std::int32_t id) const override { return special_[checked(id)]; }

  std::string token_bytes(std::int32_t id, bool first) const override {
    const std::string& piece = pieces_[checked(id)];
    return first && drops_first_space_ && piece.starts_with(' ') ? piece.substr(1) : piece;
  }

  TokenIds encode(std::string_view text) const override {
    if (!lossless_) return segment(text);
    TokenIds ids;
    std::size_t begin = 0;  // of the run of text that SentencePiece takes
    std::size_t i = 0;
    const auto flush = [&](std::size_t end) {
      if (end > begin) append_run(text.substr(begin, end - begin), ids);
    };
    while (i < text.size()) {
      const Utf8Character character = first_character(text.substr(i));
      const std::string_view bytes = text.substr(i, character.length);
      if (character.status != Utf8::valid || bytes == kSpaceSign) {
        flush(i);
        for (const char byte : bytes) ids.push_back(byte_ids_[static_cast<unsigned char>(byte)]);
        begin = i + character.length;
      } else if (splits_at_newlines_ && bytes == "\n") {  // short runs keep SentencePiece's tables small
        flush(i + 1);
        begin = i + 1;
      } else if (splits_at_words_ && bytes == " " && i > begin && text[i - 1] != ' ') {
        flush(i);
        begin = i;
      }
      i += character.length;
    }
    flush(i);
    return ids;
  }

 private:
  static std::string with_spaces(std::string_view piece) {
    std::string text;
    for (std::size_t i = 0; i < piece.size();) {
      if (piece.substr(i).starts_with(kSpaceSign)) {
        text += ' ';
        i += kSpaceSign.size();
      } else {
        text += piece[i++];
      }
    }
    return text;
  }

  std::size_t checked(std::int32_t id) const {
    if (id < 0 || id >= vocab_size()) {
      throw Error("tokenizer", "token", "is " + std::to_string(id), "0 .. " + std::to_string(vocab_size() - 1));
    }
    return static_cast<std::size_t>(id);
  }

  // Words come again and again; libsentencepiece is asked once for each of the first hundred thousand or so.
  void append_run(std::string_view run, TokenIds& ids) const {
    constexpr std::size_t kLongestWord = 32, kWordsInShard = 4096;
    if (!splits_at_words_ || run.size() > kLongestWord) {
      const TokenIds fresh = segment(run);
      ids.insert(ids.end(), fresh.begin(), fresh.end());
      return;
    }
    const std::size_t hash = std::hash<std::string_view>()(run);
    Shard& shard = shards_[hash % shards_.size()];
    {
      const std::lock_guard<std::mutex> lock(shard.mutex);
      const auto known = shard.words.find(run);
      if (known != shard.words.end()) {
        ids.insert(ids.end(), known->second.begin(), known->second.end());
        return;
      }
    }
    TokenIds fresh = segment(run);
    ids.insert(ids.end(), fresh.begin(), fresh.end());
    const std::lock_guard<std::mutex> lock(shard.mutex);
    if (shard.words.size() < kWordsInShard) shard.words.emplace(std::string(run), std::move(fresh));
  }

  TokenIds segment(std::string_view text) const {
    TokenIds ids;
    const auto status = processor_.Encode(text, &ids);
    if (!status.ok()) throw Error("tokenizer: SentencePiece cannot encode the text: " + reason_of(status));
    return ids;
  }

  std::string model_;  // the file's bytes: what save() writes and the fingerprint is taken of
  sentencepiece::SentencePieceProcessor processor_;
  std::vector<std::string> pieces_;  // the text each id stands for
  std::vector<bool> special_;
  std::array<std::int32_t, 256> byte_ids_{};
  bool drops_first_space_ = false;
  bool lossless_ = false;
  bool splits_at_newlines_ = false;
  // No piece goes on from one word into the space before the next, so words are encoded by themselves.
  bool splits_at_words_ = false;

  struct Hash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };
  struct Shard {
    std::mutex mutex;
    std::unordered_map<std::string, TokenIds, Hash, std::equal_to<>> words;
  };
  mutable std::array<Shard, 32> shards_;
};

// Cuts text into lines that SentencePiece trains on: valid UTF-8 without its space sign, at most kLongest bytes.
class Lines final : public sentencepiece::SentenceIterator {
 public:
  static constexpr std::size_t kLongest = 4096;

  explicit Lines(const TextSource& text) : text_(text) { Next(); }
  bool done() const override { return done_; }
  const std::string& value() const override { return line_; }
  sentencepiece::util::Status status() const override { return {}; }

  void Next() override {
    line_.clear();
    while (true) {
      if (at_ == piece_.size()) {
        at_ = 0;
        piece_.clear();
        if (!line_.empty()) return;
        if (!text_(piece_)) {
          done_ = true;
          return;
        }
        continue;
      }
      const std::string_view rest = std::string_view(piece_).substr(at_);
      const Utf8Character character = first_character(rest);
      const std::string_view bytes = rest.substr(0, character.length);
      const bool ends = character.status != Utf8::valid || bytes == kSpaceSign || bytes == "\n" || bytes[0] == '\0';
      if (!ends && line_.size() + bytes.size() <= kLongest) {
        line_ += bytes;
        at_ += character.length;
        continue;
      }
      if (ends) at_ += character.length;
      if (!line_.empty()) return;
    }
  }

 private:
  const TextSource& text_;
  std::string piece_;
  std::size_t at_ = 0;
  std::string line_;
  bool done_ = false;
};

}  // namespace

std::unique_ptr<Tokenizer> load_sentencepiece(const std::string& file) {
  return std::make_unique<SentencePieceTokenizer>(read_file(file), file);
}

std::unique_ptr<Tokenizer> train_sentencepiece(const TextSource& text, const SentencePieceTraining& training) {
  if (training.model_type != "bpe" && training.model_type != "unigram") {
    throw Error("train_sentencepiece", "model_type", "is " + training.model_type, "bpe or unigram");
  }
  constexpr std::int64_t kSmallest = 3 + 256 + 1;  // special tokens, bytes, text
  constexpr std::int64_t kLargest = 1'000'000;
  if (training.vocab_size < kSmallest || training.vocab_size > kLargest) {
    throw VocabularyError("train_sentencepiece: vocab_size is " + std::to_string(training.vocab_size) + "; expected " +
                              std::to_string(kSmallest) + " .. " + std::to_string(kLargest),
                          training.vocab_size, training.vocab_size < kSmallest ? kSmallest : kLargest);
  }
  Lines lines(text);
  if (lines.done()) throw Error("train_sentencepiece: there is no text to train on");
  const std::unordered_map<std::string, std::string> settings = {
      {"model_type", training.model_type},
      {"vocab_size", std::to_string(training.vocab_size)},
      {"character_coverage", std::to_string(training.character_coverage)},
      {"num_threads", std::to_string(std::max(1, training.threads))},
      {"byte_fallback", "true"},
      {"normalization_rule_name", "identity"},
      {"add_dummy_prefix", "false"},
      {"remove_extra_whitespaces", "false"},
      {"allow_whitespace_only_pieces", "true"},
      {"split_digits", "true"},
      {"input_sentence_size", "4000000"},
      {"shuffle_input_sentence", "true"},
      {"max_sentence_length", std::to_string(2 * Lines::kLongest)},
      {"unk_id", "0"},
      {"bos_id", "1"},
      {"eos_id", "2"},
      {"pad_id", "-1"},
      {"minloglevel", "2"},
  };
  std::string model;
  const auto status = sentencepiece::SentencePieceTrainer::Train(settings, &lines, &model);
  if (!status.ok()) {
    if (const std::int64_t possible = possible_vocabulary(reason_of(status)); possible > 0) {
      throw VocabularyError(
          "train_sentencepiece: a vocabulary of " + std::to_string(training.vocab_size) +
              (possible < training.vocab_size ? " is too large for this text, which allows at most "
                                              : " is too small for the characters of this text, which need at least ") +
              std::to_string(possible),
          training.vocab_size, possible);
    }
    throw Error("train_sentencepiece: a vocabulary of " + std::to_string(training.vocab_size) +
                " cannot be made from this text: " + reason_of(status));
  }
  return std::make_unique<SentencePieceTokenizer>(std::move(model), "the trained model");
}

}  // namespace flashgla::text
