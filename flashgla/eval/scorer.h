// Log-likelihoods of continuations, many at once: sequences are packed, and a context that several requests share is
// read once.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "flashgla/base/context.h"
#include "flashgla/model/language_model.h"
#include "flashgla/text/tokenizer.h"

namespace flashgla::eval {

struct Request {
  text::TokenIds context;       // at least one token
  text::TokenIds continuation;  // at least one token
  std::string name = {};        // in messages; empty: "request N"
};

struct Score {
  double log_likelihood = 0.0;  // natural log of P(continuation | context)
  bool greedy = false;          // each token is the most likely one (of equals the first)
};

struct ScoreOptions {
  std::int64_t batch_tokens = 8192;  // in one call of the model, unless a single request has more
  bool reuse_prefixes = true;        // read a shared context once, and go on from its state
};

// Calls of the model, in groups of requests of about batch_tokens, the longest first.
class Scorer {
 public:
  // Both are the caller's and must outlive this. A bf16 model on a device with matrix units computes in bf16.
  Scorer(Context& context, model::LanguageModel& model, ScoreOptions options = {});

  // In the order of the requests. `progress(done)` is called after each batch with the number of requests done; when it
  // returns false, scoring ends and an Error says so. Throws Error naming the request that is empty, has a token
  // outside the vocabulary, or whose log-likelihood is NaN.
  std::vector<Score> score(std::span<const Request> requests, const std::function<bool(std::size_t)>& progress = {});

  // Logits f32 [tokens, V] of every position of one sequence, on the CPU.
  Tensor logits(std::span<const std::int32_t> tokens);

  std::int64_t tokens_read() const { return tokens_read_; }  // by the model, of all calls so far

 private:
  struct Group;     // requests with one context
  struct Sequence;  // what the model reads at once
  void score_batch(std::span<const Request> requests, std::span<const Group> groups, std::vector<Score>& scores);
  // Reads packed sequences and scores the targets at their positions.
  void read(std::span<const Sequence> sequences, model::DecodeState* state, std::vector<Score>& scores);
  // Runs the blocks: hidden states [total, D] in the context's scratch.
  TensorView hidden_states(const std::vector<std::int32_t>& tokens, const std::vector<std::int32_t>& bounds,
                           model::DecodeState* state);
  // Logits of some hidden states, on the CPU, valid until the next call.
  const float* logits_of(const TensorView& hidden, std::span<const std::int64_t> rows);

  Context& context_;
  model::LanguageModel& model_;
  ScoreOptions options_;
  std::int64_t tokens_read_ = 0;
  Tensor host_logits_;
};

// Sum of log P of token `target` under these logits [V], and whether it is the most likely one. Computed in f64.
Score score_of(std::span<const float> logits, std::int32_t target);

}  // namespace flashgla::eval
