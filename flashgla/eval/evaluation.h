// Evaluations of one model, job by job: results of earlier jobs come from the log, new ones go there.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "flashgla/eval/job_log.h"
#include "flashgla/eval/scorer.h"
#include "flashgla/eval/tasks.h"
#include "flashgla/eval/windows.h"

namespace flashgla::eval {

// Asked after each job, with tokens done and in all, and the figure so far (a loss in nats per token, or a share of
// examples); false: the evaluation ends there, and its result says that it is not complete.
using Monitor = std::function<bool(std::int64_t done, std::int64_t total, double figure)>;

struct Work {
  Context& context;
  model::LanguageModel& model;
  JobLog& log;
  std::int64_t first_job = 0;  // jobs of other models come before
  Monitor monitor;
  std::string state_file;  // where an evaluation that ends inside a document leaves its state; empty: nowhere
  std::string name = {};   // of the model, in messages
};

struct LossOptions {
  std::int64_t window = 2048;  // tokens of one sequence
  std::int64_t stride = 2048;
  bool carry = false;  // each document in one pass instead, in pieces of `window` tokens with the state carried
  std::int64_t batch_tokens = 8192;  // of a job
};

struct LossResult {
  std::int64_t tokens = 0;                           // predicted
  double loss = 0.0;                                 // their sum of -log P, nats
  std::int64_t bytes = 0, words = 0, documents = 0;  // of all documents; 0: not known
  std::int64_t jobs = 0;
  bool complete = true;
};
LossResult evaluate_loss(const Work& work, std::span<const Document> documents, const LossOptions& options);

// Mean loss by position: `length` tokens at a time from the documents one after another, each such sequence in one pass
// from an empty state, carried from piece to piece of `window` tokens.
struct PositionOptions {
  std::int64_t length = 28672;
  std::int64_t bucket = 2048;
  std::int64_t window = 2048;
  std::int64_t sequences = 0;  // at most; 0: all that there are
};
struct PositionResult {
  std::vector<double> losses;        // nats per token, by bucket
  std::vector<std::int64_t> tokens;  // by bucket
  std::int64_t sequences = 0;
  std::int64_t jobs = 0;
  bool complete = true;
};
// Throws Error when the documents have no `length` + 1 tokens together.
PositionResult evaluate_positions(const Work& work, std::span<const Document> documents,
                                  const PositionOptions& options);

struct ExampleOptions {
  std::int64_t longest = 2048;  // tokens of context and continuation; longer contexts lose their beginning
  ScoreOptions score;
};
struct ExampleResult {
  std::vector<std::vector<Score>> scores;             // of each example, each choice
  std::int64_t done = 0;                              // examples
  std::int64_t acc = 0, acc_norm = 0, acc_bytes = 0;  // right ones, of choices
  std::int64_t greedy = 0;                            // continuations that are the most likely ones
  double log_likelihood = 0.0;                        // sum, of continuations
  std::int64_t tokens_read = 0;                       // by the model in this run
  std::int64_t jobs = 0;
  bool complete = true;
};
// Throws Error naming the example that does not fit.
ExampleResult evaluate_examples(const Work& work, const text::Tokenizer& tokenizer, std::span<const Example> examples,
                                const ExampleOptions& options);

}  // namespace flashgla::eval
