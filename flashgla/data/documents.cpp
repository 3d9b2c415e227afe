#include "flashgla/data/documents.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "flashgla/base/error.h"
#include "flashgla/data/dataset.h"

namespace flashgla::data {
namespace {

namespace fs = std::filesystem;
constexpr std::size_t kBlock = std::size_t{1} << 20;
constexpr std::int64_t kSmallestBlock = 4096;  // where a file grows while it is read

std::int64_t count_files(const fs::path& folder) {
  std::error_code failure;
  std::int64_t count = 0;
  for (auto entry = fs::recursive_directory_iterator(folder, fs::directory_options::skip_permission_denied, failure);
       !failure && entry != fs::recursive_directory_iterator(); entry.increment(failure)) {
    count += entry->is_regular_file() ? 1 : 0;
  }
  return count;
}

}  // namespace

struct DocumentReader::Source {
  std::string path;  // "-": standard input
  std::FILE* file = nullptr;
  std::int64_t bytes = -1;  // -1: unknown
  std::int64_t taken = 0;   // bytes read
  bool json_lines = false;

  ~Source() {
    if (file != nullptr && file != stdin) std::fclose(file);
  }
};

DocumentReader::DocumentReader(const DocumentOptions& options) : options_(options) {
  for (const std::string& input : options.inputs) {
    if (input == "-") {
      if (standard_input_) throw Error("standard input (-) is named twice; it can be read once");
      standard_input_ = true;
      files_.push_back(input);
    } else if (fs::is_directory(input)) {
      add_folder(input);
    } else {
      add_file(input, /*from_folder=*/false);
    }
  }
  if (files_.empty()) {
    throw Error(options.inputs.empty() ? "there is no input" : "there are no text files in " + options.inputs[0]);
  }
}

DocumentReader::~DocumentReader() = default;

bool DocumentReader::is_json_lines(const std::string& path) const {
  return options_.json_lines || std::string_view(path).ends_with(".jsonl");
}

std::int64_t DocumentReader::count_documents(std::int64_t limit) const {
  if (standard_input_) return -1;
  std::int64_t count = 0;
  for (const std::string& file : files_) {
    if (count >= limit) break;
    if (!is_json_lines(file) && options_.separator.empty()) {
      ++count;
      continue;
    }
    DocumentOptions one = options_;
    one.inputs = {file};
    DocumentReader reader(one);
    DocumentPart part;
    while (count < limit && reader.next(part)) ++count;  // these come whole
  }
  return count;
}

void DocumentReader::add_file(const std::string& path, bool from_folder) {
  std::error_code ignored;
  if (!fs::exists(path, ignored)) throw Error("cannot read " + path + ": no such file or folder");
  if (from_folder) {
    Source source;
    source.file = std::fopen(path.c_str(), "rb");
    char head[8192];
    const std::size_t count = source.file == nullptr ? 0 : std::fread(head, 1, sizeof head, source.file);
    if (source.file == nullptr || std::memchr(head, 0, count) != nullptr) {
      ++passed_over_;
      return;
    }
  }
  const auto size = fs::file_size(path, ignored);  // a pipe has none
  if (!ignored) total_ += static_cast<std::int64_t>(size);
  files_.push_back(path);
}

bool DocumentReader::holds_tokens(const std::string& folder) const {
  std::error_code absent;
  return (!options_.out.empty() && fs::equivalent(folder, options_.out, absent)) || is_prepared(folder);
}

void DocumentReader::add_folder(const std::string& path) {
  std::vector<std::string> found;
  std::error_code failure;
  // Text may lie beside tokens in the folder that is named, and nowhere else.
  const std::vector<std::string> made = holds_tokens(path) ? prepared_files() : std::vector<std::string>();
  const fs::directory_iterator top(path, failure);  // what is below it and may not be read is passed over
  if (failure) throw Error("cannot read " + path + ": " + failure.message());
  for (auto entry = fs::recursive_directory_iterator(path, fs::directory_options::skip_permission_denied, failure);
       !failure && entry != fs::recursive_directory_iterator(); entry.increment(failure)) {
    const std::string name = entry->path().filename().string();
    const bool hidden = name.starts_with('.');
    if (entry->is_directory() && (hidden || holds_tokens(entry->path().string()))) {
      entry.disable_recursion_pending();
      if (!hidden) passed_over_ += count_files(entry->path());
    }
    if (hidden || !entry->is_regular_file()) continue;
    if (entry.depth() == 0 && std::find(made.begin(), made.end(), name) != made.end()) {
      ++passed_over_;
    } else {
      found.push_back(entry->path().string());
    }
  }
  if (failure) throw Error("cannot read " + path + ": " + failure.message());
  std::sort(found.begin(), found.end());
  for (const std::string& file : found) add_file(file, /*from_folder=*/true);
}

bool DocumentReader::open_next() {
  if (file_ == files_.size()) return false;
  auto source = std::make_unique<Source>();
  source->path = files_[file_++];
  source->json_lines = is_json_lines(source->path);
  if (source->path == "-") {
    source->file = stdin;
  } else {
    source->file = std::fopen(source->path.c_str(), "rb");
    if (source->file == nullptr) throw Error("cannot read " + source->path + ": " + std::strerror(errno));
    std::error_code unknown;
    const auto size = fs::file_size(source->path, unknown);
    if (!unknown) source->bytes = static_cast<std::int64_t>(size);
  }
  source_ = std::move(source);
  buffer_.clear();
  at_ = 0;
  line_ = 0;
  ended_ = inside_ = false;
  return true;
}

bool DocumentReader::fill() {
  if (ended_) return false;
  if (at_ > 0) {
    buffer_.erase(0, at_);
    at_ = 0;
  }
  // No more than a byte beyond a file's size: that there is none says that it ended.
  std::size_t wanted = kBlock;
  if (source_->bytes >= 0) {
    const std::int64_t left = std::max<std::int64_t>(source_->bytes - source_->taken, kSmallestBlock) + 1;
    wanted = std::min(kBlock, static_cast<std::size_t>(left));
  }
  const std::size_t old = buffer_.size();
  buffer_.resize(old + wanted);
  const std::size_t count = std::fread(buffer_.data() + old, 1, wanted, source_->file);
  buffer_.resize(old + count);
  done_ += static_cast<std::int64_t>(count);
  source_->taken += static_cast<std::int64_t>(count);
  if (count < wanted) {
    if (std::ferror(source_->file) && errno == EINTR) throw Error("interrupted while reading " + source_->path);
    if (std::ferror(source_->file)) throw Error("cannot read " + source_->path + ": " + std::strerror(errno));
    ended_ = true;
  }
  return count > 0;
}

bool DocumentReader::next(DocumentPart& part) {
  while (true) {
    if (source_ && (source_->json_lines ? next_line(part) : next_text(part))) return true;
    if (!open_next()) return false;
  }
}

std::size_t DocumentReader::find(std::string_view what) {
  std::size_t from = at_;
  while (true) {
    const std::size_t place = buffer_.find(what, from);
    if (place != std::string::npos) return place;
    // `what` may lie across the end of what is read so far; fill() moves the text to the front.
    const std::size_t tail = what.size() - 1;
    from = buffer_.size() > at_ + tail ? buffer_.size() - tail - at_ : 0;
    if (!fill()) return std::string::npos;
  }
}

bool DocumentReader::next_line(DocumentPart& part) {
  while (true) {
    if (at_ == buffer_.size() && !fill()) return false;
    const std::size_t newline = find("\n");
    const std::size_t end = newline == std::string::npos ? buffer_.size() : newline;
    const std::string_view line = std::string_view(buffer_).substr(at_, end - at_);
    at_ = std::min(buffer_.size(), end + 1);
    ++line_;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const auto fail = [&](const std::string& what) {
      throw Error(source_->path + ", line " + std::to_string(line_) + ": " + what);
    };
    const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (json.is_discarded()) fail("not a JSON value in UTF-8; expected {\"" + options_.text_field + "\": \"...\"}");
    if (!json.is_object() || !json.contains(options_.text_field)) {
      fail("no field \"" + options_.text_field + "\"; --text-field names another");
    }
    const auto& text = json[options_.text_field];
    if (!text.is_string()) fail("field \"" + options_.text_field + "\" is not a text");
    part.text = text.get<std::string>();
    part.ends_document = true;
    part.document_bytes = static_cast<std::int64_t>(part.text.size());
    part.bits = json.contains("bits") && json["bits"].is_number() ? json["bits"].get<double>() : -1.0;
    return true;
  }
}

bool DocumentReader::next_text(DocumentPart& part) {
  part.bits = -1.0;
  part.document_bytes = options_.separator.empty() && source_->bytes > 0 ? source_->bytes : -1;
  if (!options_.separator.empty()) {
    while (true) {
      if (at_ == buffer_.size() && !fill()) return false;
      const std::size_t place = find(options_.separator);
      const std::size_t end = place == std::string::npos ? buffer_.size() : place;
      part.text = buffer_.substr(at_, end - at_);
      at_ = std::min(buffer_.size(), end + options_.separator.size());
      part.ends_document = true;
      part.document_bytes = static_cast<std::int64_t>(part.text.size());
      if (!part.text.empty()) return true;
    }
  }
  while (!ended_ && buffer_.size() - at_ <= options_.part_bytes) fill();
  if (at_ == buffer_.size()) {
    const bool was_inside = std::exchange(inside_, false);
    part.text.clear();
    part.ends_document = true;
    return was_inside;  // its last part was given without knowing that it was the last
  }
  std::size_t newline = buffer_.find('\n', at_ + options_.part_bytes - 1);
  while (newline == std::string::npos) {
    const std::size_t searched = buffer_.size() - at_;
    if (!fill()) break;
    newline = buffer_.find('\n', searched);
  }
  const std::size_t end = newline == std::string::npos ? buffer_.size() : newline + 1;
  part.text = buffer_.substr(at_, end - at_);
  at_ = end;
  part.ends_document = ended_ && at_ == buffer_.size();
  inside_ = !part.ends_document;
  return true;
}

}  // namespace flashgla::data
