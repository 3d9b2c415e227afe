// A task (data/recall.h): what the model says at the places that are asked for.
#pragma once

#include <cstdint>

#include "flashgla/data/token_file.h"
#include "flashgla/eval/evaluation.h"

namespace flashgla::eval {

struct RecallOptions {
  std::int64_t limit = 0;            // sequences at most; 0: all
  std::int64_t batch_tokens = 8192;  // of a job
};

struct RecallResult {
  std::int64_t sequences = 0;
  std::int64_t answers = 0;  // asked for
  std::int64_t right = 0;    // whose token is above all others
  double loss = 0.0;         // the sum of -log P of the answers, nats
  std::int64_t jobs = 0;
  bool complete = true;
};
// `task` has labels.
RecallResult evaluate_recall(const Work& work, const data::TokenSpan& task, const RecallOptions& options);

}  // namespace flashgla::eval
