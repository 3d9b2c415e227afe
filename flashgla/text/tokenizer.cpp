#include "flashgla/text/tokenizer.h"

#include <xxhash.h>

#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "flashgla/base/error.h"
#include "flashgla/base/file.h"
#include "flashgla/text/fingerprint.h"
#include "flashgla/text/huggingface.h"
#include "flashgla/text/utf8.h"

namespace flashgla::text {
namespace {

constexpr const char* kByteFile = "tokenizer.flashgla.json";
constexpr const char* kSentencePieceFile = "tokenizer.model";
constexpr const char* kHuggingFaceFile = "tokenizer.json";
constexpr const char* kFiles[] = {kHuggingFaceFile, "tokenizer_config.json", "special_tokens_map.json",
                                  kSentencePieceFile, kByteFile};

class ByteTokenizer final : public Tokenizer {
 public:
  static constexpr std::int32_t kBos = 256;
  static constexpr std::int32_t kEos = 257;
  static constexpr std::int32_t kVocab = 258;

  std::string_view kind() const override { return "byte"; }
  std::int64_t vocab_size() const override { return kVocab; }
  std::int32_t bos_id() const override { return kBos; }
  std::int32_t eos_id() const override { return kEos; }
  bool lossless() const override { return true; }
  bool splits_at_newlines() const override { return true; }
  bool is_special(std::int32_t id) const override { return id >= 256; }
  std::string fingerprint() const override { return fingerprint_of("flashgla byte 256 257"); }

  TokenIds encode(std::string_view text) const override {
    const auto* bytes = reinterpret_cast<const unsigned char*>(text.data());
    return TokenIds(bytes, bytes + text.size());
  }

  std::string token_bytes(std::int32_t id, bool /*first*/) const override {
    if (id < 0 || id >= kVocab) {
      throw Error("tokenizer", "token", "is " + std::to_string(id), "0 .. " + std::to_string(kVocab - 1));
    }
    return id < 256 ? std::string(1, static_cast<char>(id)) : std::string();
  }

  void save(const std::string& folder) const override {
    const nlohmann::ordered_json json = {{"kind", "byte"}, {"vocab_size", kVocab}, {"bos_id", kBos}, {"eos_id", kEos}};
    write_file(std::filesystem::path(folder) / kByteFile, json.dump(2) + "\n");
  }
};

std::unique_ptr<Tokenizer> load_byte_tokenizer(const std::string& file) {
  const auto json = nlohmann::json::parse(read_file(file), nullptr, /*allow_exceptions=*/false);
  const auto is = [&](const char* key, const nlohmann::json& value) {
    return json.is_object() && json.contains(key) && json[key] == value;
  };
  if (!is("kind", "byte") || !is("vocab_size", ByteTokenizer::kVocab) || !is("bos_id", ByteTokenizer::kBos) ||
      !is("eos_id", ByteTokenizer::kEos)) {
    throw Error(file +
                " is damaged or of another version: expected kind \"byte\", vocab_size 258, bos_id 256, eos_id 257");
  }
  return make_byte_tokenizer();
}

}  // namespace

std::string fingerprint_of(std::string_view definition) {
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx",
                static_cast<unsigned long long>(XXH3_64bits(definition.data(), definition.size())));
  return digits;
}

std::string Tokenizer::decode(std::span<const std::int32_t> ids) const {
  std::string text;
  bool first = true;
  for (const std::int32_t id : ids) {
    text += token_bytes(id, first);
    first = first && is_special(id);
  }
  return text;
}

std::string StreamDecoder::push(std::int32_t id) {
  held_ += tokenizer_->token_bytes(id, first_);
  first_ = first_ && tokenizer_->is_special(id);
  std::string text;
  std::string_view rest = held_;
  while (!rest.empty()) {
    const Utf8Character character = first_character(rest);
    if (character.status == Utf8::truncated) break;
    text += character.status == Utf8::valid ? rest.substr(0, character.length) : kReplacementCharacter;
    rest.remove_prefix(character.length);
  }
  held_.erase(0, held_.size() - rest.size());
  return text;
}

std::string StreamDecoder::finish() {
  // What is held is always the beginning of one character.
  std::string text = held_.empty() ? std::string() : std::string(kReplacementCharacter);
  held_.clear();
  first_ = true;
  return text;
}

std::unique_ptr<Tokenizer> make_byte_tokenizer() { return std::make_unique<ByteTokenizer>(); }

std::span<const char* const> tokenizer_files() { return kFiles; }

bool has_tokenizer(const std::string& folder) {
  for (const char* name : {kHuggingFaceFile, kSentencePieceFile, kByteFile}) {
    if (std::filesystem::exists(std::filesystem::path(folder) / name)) return true;
  }
  return false;
}

std::unique_ptr<Tokenizer> load_tokenizer(const std::string& path) {
  namespace fs = std::filesystem;
  if (fs::is_directory(path)) {
    for (const char* name : {kHuggingFaceFile, kSentencePieceFile, kByteFile}) {
      if (fs::exists(fs::path(path) / name)) return load_tokenizer(fs::path(path) / name);
    }
    throw Error("no tokenizer in " + path + ": looked for " + kHuggingFaceFile + ", " + kSentencePieceFile + " and " +
                kByteFile);
  }
  if (!fs::exists(path)) throw Error("no tokenizer at " + path + ": no such file or folder");
  if (fs::path(path).filename() == kByteFile) return load_byte_tokenizer(path);
  if (fs::path(path).extension() == ".json") return load_huggingface(path);
  return load_sentencepiece(path);
}

}  // namespace flashgla::text
