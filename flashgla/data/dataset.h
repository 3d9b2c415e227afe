// A folder of prepared data: train.bin/.idx, validation.bin/.idx (unless there is none), the tokenizer's file, and
// data.json, which says what they hold and which tokenizer made them. Of a task that was drawn (data/recall.h): no
// tokenizer, but train-labels.bin/.idx and validation-labels.bin/.idx, what is to be predicted (TokenSpan::labels).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "flashgla/data/token_file.h"
#include "flashgla/text/tokenizer.h"

namespace flashgla::data {

struct Dataset {
  TokenSpan train;
  TokenSpan validation;  // file is null when there is none
  // Null when the data came without one (a nanoGPT or llm.c file, a task).
  std::shared_ptr<const text::Tokenizer> tokenizer;
  std::int64_t vocab_size = 0;  // the tokenizer's or the task's, else largest token + 1
  // Text bytes per predicted token, for bits per byte = loss / ln 2 / this; 0 when unknown. A document of n tokens has
  // n - 1 predicted ones.
  double train_bytes_per_target = 0.0;
  double validation_bytes_per_target = 0.0;
  // -log2 of the true probability of the part's text, per byte, when its source is known (stories): the smallest loss a
  // model can reach on it. 0 when unknown.
  double train_entropy_bits_per_byte = 0.0;
  double validation_entropy_bits_per_byte = 0.0;
};

struct OpenOptions {
  TokenFormat format = TokenFormat::automatic;
  double validation = 0.0;  // fraction of a single file to keep for validation when the folder has none
  std::string tokenizer;    // folder or file of the tokenizer of a token file; empty: what lies beside it, if anything
};

// `path`: a folder made by prepare, or a token file. Throws Error when the folder's tokenizer is not the one that made
// its tokens.
Dataset open_dataset(const std::string& path, const OpenOptions& options = {});

// Throws Error that names both when `tokenizer` is not the one the data was made with. Data without one: compares the
// vocabulary's size.
void require_same_tokenizer(const Dataset& dataset, const text::Tokenizer& tokenizer, const std::string& path);

// Whether a folder holds a data.json of ours.
bool is_prepared(const std::string& folder);

// Names of the files that prepare writes into a folder.
std::vector<std::string> prepared_files();

constexpr const char* kTrainStem = "train";
constexpr const char* kValidationStem = "validation";
constexpr const char* kLabelsEnding = "-labels";  // of the stem
constexpr const char* kDatasetFile = "data.json";

}  // namespace flashgla::data
