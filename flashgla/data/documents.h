// Documents out of files, folders, JSON lines and standard input, in parts of a few megabytes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace flashgla::data {

struct DocumentOptions {
  std::vector<std::string> inputs;  // as PrepareOptions
  std::string text_field = "text";
  bool json_lines = false;
  std::string separator;
  std::string out;                                // as PrepareOptions
  std::size_t part_bytes = std::size_t{1} << 20;  // parts end at the first newline past it
};

struct DocumentPart {
  std::string text;
  bool ends_document = false;
  std::int64_t document_bytes = -1;  // of the whole document, when that is known from the start
  double bits = -1.0;                // the JSON line's `bits`, when it has them
};

class DocumentReader {
 public:
  // Lists folders at once. Throws Error when an input does not exist or when there is nothing to read.
  explicit DocumentReader(const DocumentOptions& options);
  ~DocumentReader();

  // False at the end. Throws Error naming file and line.
  bool next(DocumentPart& part);

  // How many documents there are, at most `limit`; reads no more than it must. -1: standard input is among them.
  std::int64_t count_documents(std::int64_t limit) const;

  bool reads_standard_input() const { return standard_input_; }
  std::int64_t total_bytes() const { return standard_input_ ? 0 : total_; }  // 0: unknown
  std::int64_t done_bytes() const { return done_; }
  std::int64_t passed_over() const { return passed_over_; }

 private:
  struct Source;
  bool is_json_lines(const std::string& path) const;
  void add_file(const std::string& path, bool from_folder);
  void add_folder(const std::string& path);
  bool holds_tokens(const std::string& folder) const;
  bool open_next();
  bool fill();  // reads more into buffer_; false at the end of the file
  bool next_line(DocumentPart& part);
  bool next_text(DocumentPart& part);
  std::size_t find(std::string_view what);  // in the open document, reading on as needed; npos: not in this file

  DocumentOptions options_;
  std::vector<std::string> files_;
  bool standard_input_ = false;
  std::int64_t total_ = 0, done_ = 0, passed_over_ = 0;

  std::size_t file_ = 0;  // index of the next file to open
  std::unique_ptr<Source> source_;
  std::string buffer_;
  std::size_t at_ = 0;   // of what is not given yet
  bool ended_ = false;   // the file is read to its end
  bool inside_ = false;  // a document is open: a part of it was given
  std::int64_t line_ = 0;
};

}  // namespace flashgla::data
