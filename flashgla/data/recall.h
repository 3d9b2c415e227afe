// Multi-query associative recall (MQAR; Arora et al. 2023, arXiv 2312.04927): which value came with this key?
//
//     k1 v1 k2 v2 ... kn vn  . . k3 . . . k1 . ...         at each later key the label is its value
//
// Keys are drawn from [1, V/2) and values from [V/2, V), without repetition. Of the slots s = 0 .. (T-2n)/2 - 1 behind
// the pairs n are drawn one after the other, without repetition, each in proportion to (s+1)^(power-1) among those that
// are left; the i-th drawn is pair i's, and its key stands at 2n + 2s. Everything else is token 0, or any token.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace flashgla::data {

struct RecallOptions {
  std::int64_t vocabulary = 8192;  // V
  std::int64_t length = 256;       // T
  std::int64_t pairs = 16;         // n
  double power = 0.01;
  bool random_fillers = false;   // tokens between the queries: uniform over the vocabulary instead of 0
  std::int64_t train = 100'000;  // sequences
  std::int64_t validation = 3'000;
  std::uint64_t seed = 0;
  std::string out;                                                      // folder
  std::function<void(std::int64_t done, std::int64_t total)> progress;  // sequences

  // Throws Error that names the option, its value and what it must be.
  void validate() const;
};

// A folder that open_dataset reads, with labels. Sequence i of a part depends on (seed, part, i) alone. Throws Error.
void write_recall(const RecallOptions& options);

}  // namespace flashgla::data
