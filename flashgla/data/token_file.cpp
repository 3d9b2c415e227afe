#include "flashgla/data/token_file.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>

#include "flashgla/base/error.h"

namespace flashgla::data {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kMegatronMagic{"MMIDIDX\0\0", 9};
constexpr std::size_t kMegatronHeader = 9 + 8 + 1 + 8 + 8;
constexpr std::uint8_t kMegatronI32 = 4;
constexpr std::uint8_t kMegatronU16 = 8;
constexpr std::int32_t kLlmcMagic = 20240520;
constexpr std::size_t kLlmcHeader = 256 * sizeof(std::int32_t);
constexpr std::size_t kBuffer = std::size_t{1} << 20;
constexpr std::int64_t kLongestSequence = std::int64_t{1} << 30;

// The fields of an index are not aligned.
template <class T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

[[noreturn]] void damaged(const std::string& path, const std::string& how) {
  throw Error(path + " " + how + "; the file is truncated or damaged: prepare the data again or copy it anew");
}

bool has_llmc_magic(const MappedFile& file) {
  return file.size() >= kLlmcHeader && load<std::int32_t>(file.data()) == kLlmcMagic;
}

}  // namespace

const char* name_of(TokenFormat format) {
  switch (format) {
    case TokenFormat::automatic:
      return "auto";
    case TokenFormat::megatron:
      return "megatron";
    case TokenFormat::nanogpt:
      return "nanogpt";
    case TokenFormat::llmc:
      return "llm.c";
  }
  return "";
}

TokenFormat token_format_from_name(std::string_view name) {
  for (const TokenFormat format :
       {TokenFormat::automatic, TokenFormat::megatron, TokenFormat::nanogpt, TokenFormat::llmc}) {
    if (name == name_of(format)) return format;
  }
  throw Error("token file", "format", "is " + std::string(name), "auto, megatron, nanogpt or llm.c");
}

std::shared_ptr<const TokenFile> TokenFile::open(const std::string& path, TokenFormat format) {
  if (fs::exists(path) && !fs::is_regular_file(path) && !fs::is_directory(path)) {
    throw Error("cannot open " + path +
                ": not a regular file; `flashgla data prepare` turns text into a folder of tokens");
  }
  fs::path bin = path;
  const bool names_index = bin.extension() == ".idx";
  if (names_index || (bin.extension() != ".bin" && !fs::is_regular_file(bin))) {
    bin = names_index ? bin.replace_extension(".bin") : fs::path(path + ".bin");
  }
  fs::path index = bin;
  index.replace_extension(".idx");
  const bool has_index = fs::exists(index);
  if (format == TokenFormat::megatron && !has_index) {
    throw Error(index.string() + " is missing; a Megatron token file is a pair of .bin and .idx");
  }
  if (names_index && !has_index) throw Error("cannot open " + path + ": no such file");
  if (!fs::exists(path) && !fs::exists(bin)) throw Error("cannot open " + path + ": no such file or folder");
  if (!fs::exists(bin)) {
    throw Error("cannot open " + bin.string() + ": no such token file" +
                (fs::is_directory(path) ? " in a folder; `flashgla data prepare` makes one" : ""));
  }

  std::shared_ptr<TokenFile> file(new TokenFile(bin.string()));
  if (format == TokenFormat::automatic) {
    if (bin.extension() != ".bin") {
      throw Error(path + " is no token file (.bin); `flashgla data prepare` turns text into one");
    }
    format = has_index                        ? TokenFormat::megatron
             : has_llmc_magic(file->mapping_) ? TokenFormat::llmc
                                              : TokenFormat::nanogpt;
  }
  file->format_ = format;
  if (format == TokenFormat::megatron) {
    file->read_megatron_index(index.string());
  } else {
    if (format == TokenFormat::llmc) file->read_llmc_header();
    const std::size_t bytes = file->mapping_.size() - file->data_begin_;
    if (bytes % 2 != 0) damaged(file->path_, "holds " + std::to_string(bytes) + " bytes of 16-bit tokens");
    file->dtype_ = DType::u16;
    file->tokens_ = static_cast<std::int64_t>(bytes / 2);
    file->document_begins_ = {0};
    if (file->tokens_ > 0) file->document_begins_.push_back(file->tokens_);
  }
  if (file->tokens_ == 0) throw Error(file->path_ + " holds no tokens");
  return file;
}

void TokenFile::read_llmc_header() {
  if (!has_llmc_magic(mapping_)) damaged(path_, "does not begin with llm.c's number 20240520");
  const auto version = load<std::int32_t>(mapping_.data() + 4);
  const auto count = load<std::int32_t>(mapping_.data() + 8);
  if (version != 1) {
    throw Error(path_ + ": llm.c version is " + std::to_string(version) + "; expected 1 (16-bit tokens)");
  }
  if (count < 0 || mapping_.size() != kLlmcHeader + 2 * static_cast<std::size_t>(count)) {
    damaged(path_, "holds " + std::to_string(mapping_.size()) + " bytes, but its header says " + std::to_string(count) +
                       " tokens");
  }
  data_begin_ = kLlmcHeader;
}

void TokenFile::read_megatron_index(const std::string& index) {
  const MappedFile idx(index);
  const std::byte* at = idx.data();
  if (idx.size() < kMegatronHeader || std::memcmp(at, kMegatronMagic.data(), kMegatronMagic.size()) != 0) {
    damaged(index, "does not begin as a Megatron index (MMIDIDX)");
  }
  const auto version = load<std::uint64_t>(at + 9);
  const auto code = load<std::uint8_t>(at + 17);
  const auto sequences = load<std::uint64_t>(at + 18);
  const auto entries = load<std::uint64_t>(at + 26);  // documents + 1
  if (version != 1) throw Error(index + ": version is " + std::to_string(version) + "; expected 1");
  if (code != kMegatronI32 && code != kMegatronU16) {
    throw Error(index + ": token type " + std::to_string(code) + " is not supported; expected 8 (uint16) or 4 (int32)");
  }
  dtype_ = code == kMegatronU16 ? DType::u16 : DType::i32;
  const std::size_t body = idx.size() - kMegatronHeader;
  // Newer writers append one mode byte a sequence.
  const auto fits = [&](std::uint64_t per_sequence) {
    return sequences <= body / per_sequence && entries <= body / 8 && sequences * per_sequence + entries * 8 == body;
  };
  if (!fits(12) && !fits(13)) {
    damaged(index, "holds " + std::to_string(idx.size()) + " bytes, but its header says " + std::to_string(sequences) +
                       " sequences and " + std::to_string(entries) + " document entries");
  }

  const std::byte* lengths = at + kMegatronHeader;
  const std::byte* offsets = lengths + 4 * sequences;
  const std::byte* documents = offsets + 8 * sequences;
  std::vector<std::int64_t> begins(sequences + 1, 0);
  const auto item = static_cast<std::int64_t>(size_of(dtype_));
  for (std::uint64_t i = 0; i < sequences; ++i) {
    const auto length = load<std::int32_t>(lengths + 4 * i);
    if (length < 0) damaged(index, "gives sequence " + std::to_string(i) + " a negative length");
    if (load<std::int64_t>(offsets + 8 * i) != begins[i] * item) {
      damaged(index, "places sequence " + std::to_string(i) + " elsewhere than after the one before it");
    }
    begins[i + 1] = begins[i] + length;
  }
  tokens_ = begins[sequences];
  const auto expected = static_cast<std::uint64_t>(tokens_) * size_of(dtype_);
  if (mapping_.size() != expected) {
    damaged(path_, "holds " + std::to_string(mapping_.size()) + " bytes, but its index says " +
                       std::to_string(expected) + " (" + std::to_string(tokens_) + " tokens)");
  }

  document_begins_ = {0};
  std::int64_t previous = 0;
  for (std::uint64_t i = 0; i < entries; ++i) {
    const auto sequence = load<std::int64_t>(documents + 8 * i);
    if (sequence < previous || sequence > static_cast<std::int64_t>(sequences) || (i == 0 && sequence != 0)) {
      damaged(index, "has a document index that is not ascending from 0");
    }
    previous = sequence;
    const std::int64_t begin = begins[static_cast<std::size_t>(sequence)];
    if (begin > document_begins_.back()) document_begins_.push_back(begin);  // documents without tokens drop out
  }
  if (document_begins_.back() != tokens_) damaged(index, "has a document index that does not end at the last sequence");
}

void TokenFile::read(std::int64_t begin, std::int64_t count, std::int32_t* out) const {
  if (begin < 0 || count < 0 || begin > tokens_ - count) {
    throw Error("token file", "range", "is [" + std::to_string(begin) + ", " + std::to_string(begin + count) + ")",
                "within [0, " + std::to_string(tokens_) + ")");
  }
  const std::byte* from = mapping_.data() + data_begin_ + static_cast<std::size_t>(begin) * size_of(dtype_);
  if (dtype_ == DType::u16) {
    for (std::int64_t i = 0; i < count; ++i) out[i] = load<std::uint16_t>(from + 2 * i);
    return;
  }
  std::memcpy(out, from, static_cast<std::size_t>(count) * sizeof(std::int32_t));
  const auto* negative = std::find_if(out, out + count, [](std::int32_t token) { return token < 0; });
  if (negative != out + count) {
    damaged(path_, "holds the negative token " + std::to_string(*negative) + " at " +
                       std::to_string(begin + (negative - out)));
  }
}

std::int32_t TokenFile::largest_token() const {
  std::vector<std::int32_t> buffer(kBuffer / sizeof(std::int32_t));
  std::int32_t largest = 0;
  for (std::int64_t at = 0; at < tokens_;) {
    const std::int64_t count = std::min<std::int64_t>(static_cast<std::int64_t>(buffer.size()), tokens_ - at);
    read(at, count, buffer.data());
    largest = std::max(largest, *std::max_element(buffer.begin(), buffer.begin() + count));
    at += count;
  }
  return largest;
}

std::vector<std::int64_t> TokenSpan::document_begins() const {
  std::vector<std::int64_t> inside = {0};
  const std::vector<std::int64_t>& begins = file->document_begins();
  for (auto next = std::upper_bound(begins.begin(), begins.end(), begin); next != begins.end() && *next < end; ++next) {
    inside.push_back(*next - begin);
  }
  if (size() > 0) inside.push_back(size());
  return inside;
}

TokenSpan whole(std::shared_ptr<const TokenFile> file) {
  const std::int64_t tokens = file->tokens();
  return {std::move(file), 0, tokens};
}

std::pair<TokenSpan, TokenSpan> split(const TokenSpan& span, double fraction) {
  if (!(fraction > 0.0 && fraction < 1.0)) {
    throw Error("split", "fraction", "is " + std::to_string(fraction), "between 0 and 1, neither included");
  }
  const auto last = std::max<std::int64_t>(1, std::llround(fraction * static_cast<double>(span.size())));
  if (last >= span.size()) {
    throw Error(span.file->path() + " is too short to keep a part for validation: " + std::to_string(span.size()) +
                " tokens");
  }
  const std::int64_t cut = span.size() - last;
  const std::vector<std::int64_t> begins = span.document_begins();
  std::int64_t best = cut;
  std::int64_t distance = (last + 1) / 2;
  for (const std::int64_t begin : begins) {
    if (begin > 0 && begin < span.size() && std::abs(begin - cut) < distance) {
      best = begin;
      distance = std::abs(begin - cut);
    }
  }
  return {{span.file, span.begin, span.begin + best}, {span.file, span.begin + best, span.end}};
}

TokenFileWriter::TokenFileWriter(const std::string& stem, std::int64_t vocab_size)
    : vocab_size_(vocab_size),
      dtype_(vocab_size <= 65536 ? DType::u16 : DType::i32),
      bin_(stem + ".bin"),
      idx_(stem + ".idx") {
  if (vocab_size < 1 || vocab_size > std::numeric_limits<std::int32_t>::max()) {
    throw Error("token file", "vocab_size", "is " + std::to_string(vocab_size), "1 .. 2147483647");
  }
  buffer_.reserve(kBuffer);
}

void TokenFileWriter::append(std::span<const std::int32_t> ids) {
  const auto outside =
      std::find_if(ids.begin(), ids.end(), [&](std::int32_t id) { return id < 0 || id >= vocab_size_; });
  if (outside != ids.end()) {
    throw Error("token file", "token", "is " + std::to_string(*outside), "0 .. " + std::to_string(vocab_size_ - 1));
  }
  while (!ids.empty()) {
    const auto space = static_cast<std::size_t>(kLongestSequence - open_length_);
    const auto count = std::min({ids.size(), space, (kBuffer - buffer_.size()) / size_of(dtype_)});
    const std::size_t used = buffer_.size();
    buffer_.resize(used + count * size_of(dtype_));
    if (dtype_ == DType::u16) {
      auto* to = reinterpret_cast<std::uint16_t*>(buffer_.data() + used);
      for (std::size_t i = 0; i < count; ++i) to[i] = static_cast<std::uint16_t>(ids[i]);
    } else {
      std::memcpy(buffer_.data() + used, ids.data(), count * sizeof(std::int32_t));
    }
    ids = ids.subspan(count);
    tokens_ += static_cast<std::int64_t>(count);
    open_length_ += static_cast<std::int64_t>(count);
    if (open_length_ == kLongestSequence) end_sequence();
    if (buffer_.size() == kBuffer) flush();
  }
}

void TokenFileWriter::end_sequence() {
  if (open_length_ == 0) return;
  lengths_.push_back(static_cast<std::int32_t>(open_length_));
  open_length_ = 0;
}

void TokenFileWriter::end_document() {
  end_sequence();
  const auto sequences = static_cast<std::int64_t>(lengths_.size());
  if (sequences > document_index_.back()) document_index_.push_back(sequences);
}

void TokenFileWriter::flush() {
  bin_.write(buffer_.data(), buffer_.size());
  buffer_.clear();
}

void TokenFileWriter::close() {
  if (closed_) return;
  end_document();
  flush();
  bin_.close();

  const auto put = [&](const auto& value) { idx_.write(&value, sizeof value); };
  idx_.write(kMegatronMagic);
  put(std::uint64_t{1});
  put(dtype_ == DType::u16 ? kMegatronU16 : kMegatronI32);
  put(static_cast<std::uint64_t>(lengths_.size()));
  put(static_cast<std::uint64_t>(document_index_.size()));
  idx_.write(lengths_.data(), lengths_.size() * sizeof(std::int32_t));
  std::vector<std::int64_t> offsets(lengths_.size());
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < lengths_.size(); ++i) {
    offsets[i] = offset;
    offset += lengths_[i] * static_cast<std::int64_t>(size_of(dtype_));
  }
  idx_.write(offsets.data(), offsets.size() * sizeof(std::int64_t));
  idx_.write(document_index_.data(), document_index_.size() * sizeof(std::int64_t));
  idx_.close();
  closed_ = true;
}

void TokenFileWriter::publish() {
  close();
  bin_.finish();
  idx_.finish();
}

}  // namespace flashgla::data
