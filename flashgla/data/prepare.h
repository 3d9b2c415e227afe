// Text to a folder of tokens.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace flashgla::data {

struct PrepareOptions {
  // Files, folders (recursive, in the order of their names; hidden files, those with NUL bytes, `out` and other
  // prepared data are passed over), "-" for standard input. Files that end in .jsonl are JSON lines; every other file
  // is one document.
  std::vector<std::string> inputs;
  std::string out;                  // folder, made when missing; prepared data in it are replaced, other tokens refused
  std::string tokenizer = "byte";   // "byte", a tokenizer's file or folder, "train:VOCAB", "train-unigram:VOCAB"
  std::string text_field = "text";  // of JSON lines
  bool json_lines = false;          // whatever the names are
  std::string separator;            // of documents within plain text; empty: none
  double validation = 0.05;         // fraction of the documents, at most a half; 0: none
  std::uint64_t seed = 0;           // which documents are validation
  int threads = 0;                  // 0: all
  std::function<void(std::int64_t done, std::int64_t total)> progress;  // bytes of input; total 0: unknown
};

struct PreparedPart {
  std::int64_t tokens = 0;
  std::int64_t documents = 0;
  std::int64_t text_bytes = 0;
};

struct PrepareReport {
  PreparedPart train, validation;
  std::int64_t vocab_size = 0;
  std::string tokenizer_kind;
  std::int64_t passed_over = 0;  // files in folders that are no text, or prepared data
};

// Each document becomes bos (where the tokenizer adds it), its tokens, eos (where it has one). Of many documents a
// seeded choice of whole ones is validation, spread evenly; of few, each one's end is, without specials at the cut.
// JSON lines with a number `bits` (-log2 of the text's true probability) hand it on as the parts' entropy. Files appear
// in the folder when all is written. Throws Error naming the input (and line) that cannot be read.
PrepareReport prepare(const PrepareOptions& options);

}  // namespace flashgla::data
