// Token files, memory-mapped. Written: Megatron .bin/.idx. Read: that, nanoGPT's raw uint16 .bin, llm.c's .bin.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "flashgla/base/dtype.h"
#include "flashgla/base/file.h"

namespace flashgla::data {

enum class TokenFormat : std::uint8_t { automatic, megatron, nanogpt, llmc };
const char* name_of(TokenFormat format);
TokenFormat token_format_from_name(std::string_view name);  // throws Error that lists the names

// A read-only file of tokens, cut into documents. Files without document boundaries (nanoGPT, llm.c) are one document.
class TokenFile {
 public:
  // `path`: the .bin (or, for Megatron, the .idx, or both without their ending). `automatic`: Megatron when the .idx is
  // there, llm.c by its magic number, else nanoGPT; only of names that end in .bin. Throws Error naming file and remedy
  // when a file is missing, truncated or inconsistent.
  static std::shared_ptr<const TokenFile> open(const std::string& path, TokenFormat format = TokenFormat::automatic);

  const std::string& path() const { return path_; }
  TokenFormat format() const { return format_; }
  DType dtype() const { return dtype_; }  // u16 or i32
  std::int64_t tokens() const { return tokens_; }
  std::int64_t documents() const { return static_cast<std::int64_t>(document_begins_.size()) - 1; }
  // [documents() + 1]: where each document begins; the last is tokens().
  const std::vector<std::int64_t>& document_begins() const { return document_begins_; }
  std::size_t bytes() const { return mapping_.size(); }  // of the .bin

  // Copies tokens [begin, begin + count) as i32. Throws Error when a token is negative.
  void read(std::int64_t begin, std::int64_t count, std::int32_t* out) const;
  // Largest id in the file; reads all of it.
  std::int32_t largest_token() const;

 private:
  explicit TokenFile(const std::string& path) : mapping_(path), path_(path) {}
  void read_megatron_index(const std::string& index);
  void read_llmc_header();

  MappedFile mapping_;
  std::size_t data_begin_ = 0;  // of the first token in the mapping
  std::string path_;
  TokenFormat format_ = TokenFormat::nanogpt;
  DType dtype_ = DType::u16;
  std::int64_t tokens_ = 0;
  std::vector<std::int64_t> document_begins_;
};

// Some consecutive tokens of a file; keeps the file open.
struct TokenSpan {
  std::shared_ptr<const TokenFile> file;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  // Null: what is to be predicted is the next token. Else each document of `file` has one here: pairs of a place in it
  // and the token that is to be predicted there, places in growing order.
  std::shared_ptr<const TokenFile> labels{};
  std::int64_t size() const { return end - begin; }
  // Begins of the documents inside, relative to `begin`, and the size: [documents + 1]. Documents are cut at the ends.
  std::vector<std::int64_t> document_begins() const;
};

TokenSpan whole(std::shared_ptr<const TokenFile> file);

// The first part and the last `fraction` of the tokens. The cut moves to the nearest boundary of documents when that
// changes the last part's size by less than half.
std::pair<TokenSpan, TokenSpan> split(const TokenSpan& span, double fraction);

// Writes stem.bin and stem.idx under temporary names; publish() gives them their own. Destroyed before that, it leaves
// nothing behind.
class TokenFileWriter {
 public:
  // u16 when vocab_size <= 65536, else i32.
  TokenFileWriter(const std::string& stem, std::int64_t vocab_size);

  // Appends to the open document. Throws Error on ids outside the vocabulary and on a full disk.
  void append(std::span<const std::int32_t> ids);
  void end_document();  // a document without tokens is not recorded
  // Ends the open document and forces both files to disk.
  void close();
  void publish();  // close() and rename

  std::int64_t tokens() const { return tokens_; }
  std::int64_t documents() const { return static_cast<std::int64_t>(document_index_.size()) - 1; }

 private:
  void end_sequence();
  void flush();

  std::int64_t vocab_size_;
  DType dtype_;
  AtomicFile bin_;
  AtomicFile idx_;
  std::vector<std::byte> buffer_;
  // Megatron's index: documents are runs of sequences, whose lengths are 32-bit.
  std::vector<std::int32_t> lengths_;
  std::vector<std::int64_t> document_index_ = {0};
  std::int64_t open_length_ = 0;
  std::int64_t tokens_ = 0;
  bool closed_ = false;
};

}  // namespace flashgla::data
