// Text to token ids and back. Three kinds: bytes, SentencePiece models (loaded or trained here), and the tokenizer.json
// of Hugging Face checkpoints.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "flashgla/base/error.h"

namespace flashgla::text {

using TokenIds = std::vector<std::int32_t>;

// Immutable once made, so that threads may share it.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  virtual std::string_view kind() const = 0;    // "byte", "sentencepiece", "huggingface"
  virtual std::int64_t vocab_size() const = 0;  // ids are 0 .. vocab_size-1
  virtual std::int32_t bos_id() const = 0;      // -1: none
  virtual std::int32_t eos_id() const = 0;      // -1: none

  // Whether bos goes before the tokens of a text that begins a sequence, and eos after those of a text by itself. A
  // document in a corpus ends in eos in any case.
  virtual bool adds_bos() const { return bos_id() >= 0; }
  virtual bool adds_eos() const { return false; }

  // Any bytes, valid UTF-8 or not; no special tokens are added. decode(encode(text)) == text, except where a foreign
  // tokenizer changes the text (lossless() is then false).
  virtual TokenIds encode(std::string_view text) const = 0;

  // Special tokens decode to nothing. Throws Error when an id is out of range.
  std::string decode(std::span<const std::int32_t> ids) const;

  // decode(encode(text)) == text for every text.
  virtual bool lossless() const = 0;

  // encode(a + b) is encode(a) followed by encode(b) whenever a ends in a newline: long texts may be cut there.
  virtual bool splits_at_newlines() const = 0;

  // 16 hexadecimal digits that tell tokenizers apart: token files carry those of the tokenizer that made them.
  virtual std::string fingerprint() const = 0;

  // Writes the tokenizer's files (tokenizer_files()) into the folder, each under a temporary name, then renamed. Throws
  // Error.
  virtual void save(const std::string& folder) const = 0;

  // Specials (bos, eos, padding) stand for no text.
  virtual bool is_special(std::int32_t id) const = 0;

  // The bytes that one token adds to a text; `first` says that nothing precedes it (SentencePiece models that put a
  // space before the text drop it there). Not a whole character always: see StreamDecoder. Throws Error when the id is
  // out of range.
  virtual std::string token_bytes(std::int32_t id, bool first) const = 0;
};

// Ids one at a time to text in whole characters: bytes of an unfinished UTF-8 character are held back until the tokens
// that complete it arrive, and bytes that can never become one come out as U+FFFD.
class StreamDecoder {
 public:
  // `first`: the first token begins a text (see token_bytes), and does not go on from one.
  explicit StreamDecoder(const Tokenizer& tokenizer, bool first = true) : tokenizer_(&tokenizer), first_(first) {}

  // The text that became whole with this token; often empty in the middle of a character.
  std::string push(std::int32_t id);
  // What was held back, as U+FFFD; the decoder is then as new.
  std::string finish();
  std::size_t held_bytes() const { return held_.size(); }

 private:
  const Tokenizer* tokenizer_;
  std::string held_;
  bool first_;
};

// 256 bytes, then bos = 256 and eos = 257.
std::unique_ptr<Tokenizer> make_byte_tokenizer();

// From a SentencePiece model file. Throws Error that names the file.
std::unique_ptr<Tokenizer> load_sentencepiece(const std::string& file);

struct SentencePieceTraining {
  std::int64_t vocab_size = 8192;  // includes <unk>, <s>, </s> and the 256 byte pieces
  std::string model_type = "bpe";  // or "unigram"
  double character_coverage = 0.9995;
  int threads = 1;
};

// The text cannot have a vocabulary of the size that was asked for; it can have one of `possible`.
struct VocabularyError : Error {
  VocabularyError(const std::string& message, std::int64_t asked, std::int64_t possible)
      : Error(message), asked(asked), possible(possible) {}
  std::int64_t asked, possible;
};

// Fills in the next piece of text, in any cut; false at the end.
using TextSource = std::function<bool(std::string&)>;

// Trains on the given text (a seeded sample of its lines when there are more than four million): identity
// normalisation, no dummy prefix, byte fallback, digits apart, newline as a byte piece; so the tokenizer is lossless.
// Equal texts and settings give equal models. Throws Error when the text is too small for the vocabulary, naming the
// largest size that would do.
std::unique_ptr<Tokenizer> train_sentencepiece(const TextSource& text, const SentencePieceTraining& training);

// From a folder (`tokenizer.json`, `tokenizer.model`, `tokenizer.flashgla.json`, in this order) or from such a file.
// Throws Error that lists what was looked for.
std::unique_ptr<Tokenizer> load_tokenizer(const std::string& path);
bool has_tokenizer(const std::string& folder);

// The names of all files that tokenizers are saved in: what a copy of a folder takes along, and a new one removes.
std::span<const char* const> tokenizer_files();

}  // namespace flashgla::text
