// From logits to a token.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace flashgla::generate {

struct SamplerOptions {
  double temperature = 1.0;         // 0: greedy, the most likely token (the first of equals)
  std::int64_t top_k = 0;           // only the k most likely; 0: all
  double top_p = 1.0;               // only the most likely that together reach this probability
  double min_p = 0.0;               // only those with at least this share of the most likely one's probability
  double repetition_penalty = 1.0;  // logits of tokens already seen: divided by it if positive, else multiplied
  std::uint64_t seed = 0;

  // Throws Error that names the option.
  void validate() const;
};

// Applied in this order: repetition penalty, temperature, top-k, top-p, min-p; what is left is normalised. At least one
// token is always left; of equally likely tokens the lower comes first. Allocates at construction only.
class Sampler {
 public:
  struct Candidate {
    std::int32_t token;
    double probability;
  };

  Sampler(const SamplerOptions& options, std::int64_t vocabulary);

  // `seen`: one byte a token, not 0 for those that the penalty applies to; empty: none.
  // The draw is a function of (seed, sequence, position) and the logits alone: it does not depend on what else is
  // generated beside it. Throws Error when a logit is NaN or no logit is finite.
  std::int32_t sample(std::span<const float> logits, std::span<const std::uint8_t> seen, std::uint64_t sequence,
                      std::uint64_t position);

  // The distribution that sample draws from; valid until the next call.
  std::span<const Candidate> distribution(std::span<const float> logits, std::span<const std::uint8_t> seen);

 private:
  SamplerOptions options_;
  std::vector<Candidate> candidates_;
};

}  // namespace flashgla::generate
