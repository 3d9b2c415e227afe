// Token files, memory-mapped. Written: Megatron .bin/.idx. Read: that, nanoGPT's raw uint16 .bin, llm.c's .bin.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "flashgla/base/dtype.h"
#include "flashgla/text/tokenizer.h"

namespace flashgla::data {

enum class TokenFormat : std::uint8_t { automatic, megatron, nanogpt, llmc };
const char* name_of(TokenFormat format);
TokenFormat token_format_from_name(std::string_view name);  // throws Error that lists the names

// A read-only file of tokens, cut into documents. Files without document boundaries (nanoGPT, llm.c) are one document.
class TokenFile {
 public:
  // `path`: the .bin (or, for Megatron, the .idx, or both without their ending). `automatic`: Megatron when the .idx is
  // there, llm.c by its magic number, else nanoGPT. Throws Error naming file and remedy when a file is missing,
  // truncated or inconsistent.
  static std::shared_ptr<const TokenFile> open(const std::string& path, TokenFormat format = TokenFormat::automatic);
  ~TokenFile();
  TokenFile(const TokenFile&) = delete;
  TokenFile& operator=(const TokenFile&) = delete;

  const std::string& path() const { return path_; }
  TokenFormat format() const { return format_; }
  DType dtype() const { return dtype_; }  // u16 or i32
  std::int64_t tokens() const { return tokens_; }
  std::int64_t documents() const { return static_cast<std::int64_t>(document_begins_.size()) - 1; }
  // [documents() + 1]: where each document begins; the last is tokens().
  const std::vector<std::int64_t>& document_begins() const { return document_begins_; }
  std::size_t bytes() const;

  // Copies tokens [begin, begin + count) as i32. Throws Error when a token is negative.
  void read(std::int64_t begin, std::int64_t count, std::int32_t* out) const;
  // Largest id in the file; reads all of it.
  std::int32_t largest_token() const;

 private:
  TokenFile() = default;
  struct Mapping;
  std::unique_ptr<Mapping> mapping_;
  const std::byte* data_ = nullptr;  // first token
  std::string path_;
  TokenFormat format_ = TokenFormat::automatic;
  DType dtype_ = DType::u16;
  std::int64_t tokens_ = 0;
  std::vector<std::int64_t> document_begins_;
};

// Some consecutive tokens of a file; keeps the file open.
struct TokenSpan {
  std::shared_ptr<const TokenFile> file;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const { return end - begin; }
  // Begins of the documents inside, relative to `begin`, and the size: [documents + 1]. Documents are cut at the ends.
  std::vector<std::int64_t> document_begins() const;
};

TokenSpan whole(std::shared_ptr<const TokenFile> file);

// The first part and the last `fraction` of the tokens; the cut is moved to the nearest boundary of documents when
// there is one that leaves neither part empty.
std::pair<TokenSpan, TokenSpan> split(const TokenSpan& span, double fraction);

// Writes stem.bin and stem.idx under temporary names; finish() renames them. Destroyed before that, it removes them.
class TokenFileWriter {
 public:
  // u16 when vocab_size <= 65536, else i32.
  TokenFileWriter(std::string stem, std::int64_t vocab_size);
  ~TokenFileWriter();
  TokenFileWriter(const TokenFileWriter&) = delete;
  TokenFileWriter& operator=(const TokenFileWriter&) = delete;

  // Appends to the open document. Throws Error on ids outside the vocabulary and on a full disk.
  void append(std::span<const std::int32_t> ids);
  void end_document();  // an empty document is not recorded
  void finish();

  std::int64_t tokens() const { return tokens_; }
  std::int64_t documents() const { return static_cast<std::int64_t>(lengths_.size()); }

 private:
  void flush();

  std::string stem_;
  std::int64_t vocab_size_;
  DType dtype_;
  int descriptor_ = -1;
  std::vector<std::byte> buffer_;
  std::vector<std::int64_t> lengths_;
  std::int64_t open_length_ = 0;
  std::int64_t tokens_ = 0;
  bool finished_ = false;
};

}  // namespace flashgla::data
