// A corpus of small stories out of a grammar, whose true entropy is known to the last digit: what a model has still to
// learn is its loss less that. Names, things, places and numbers that a story introduces come back much later, so that
// the best loss is reached only by carrying them in the state.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "flashgla/data/grammar.h"

namespace flashgla::data {

const Grammar& story_grammar();

struct StoriesOptions {
  std::uint64_t seed = 0;
  double megabytes = 8.0;  // of text, 10^6 bytes; the last story may go past it
  std::string out;         // .jsonl: one {"text": ..., "bits": -log2 of its probability} a line
  std::function<void(std::int64_t done, std::int64_t total)> progress;  // bytes of text
};

struct StoriesReport {
  std::int64_t documents = 0;
  std::int64_t text_bytes = 0;
  double entropy_bits_per_byte = 0.0;   // of the grammar, exact: expected bits over expected bytes of a story
  double realised_bits_per_byte = 0.0;  // of this corpus: -log2 of its probability over its bytes
  double standard_error = 0.0;          // of the realised rate around the exact one
  std::string figures_file;             // `out` with .json for .jsonl: these figures
};

// Story i depends on (seed, i) only. Throws Error.
StoriesReport write_stories(const StoriesOptions& options);

}  // namespace flashgla::data
