#include "flashgla/generate/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

#include "flashgla/base/error.h"
#include "flashgla/base/random.h"

namespace flashgla::generate {

namespace {

void require(bool ok, const char* name, double value, const char* expected) {
  if (ok) return;
  std::ostringstream text;
  text << "is " << value;
  throw Error("sampling", name, text.str(), expected);
}

bool more_likely(const Sampler::Candidate& a, const Sampler::Candidate& b) {
  return a.probability != b.probability ? a.probability > b.probability : a.token < b.token;
}

void normalize(std::vector<Sampler::Candidate>& candidates) {
  double total = 0.0;
  for (const auto& candidate : candidates) total += candidate.probability;
  for (auto& candidate : candidates) candidate.probability /= total;
}

}  // namespace

void SamplerOptions::validate() const {
  require(temperature >= 0.0 && std::isfinite(temperature), "temperature", temperature, "0 (greedy) or more");
  require(top_k >= 0, "top_k", static_cast<double>(top_k), "0 (all) or more");
  require(top_p > 0.0 && top_p <= 1.0, "top_p", top_p, "in (0, 1]");
  require(min_p >= 0.0 && min_p <= 1.0, "min_p", min_p, "in [0, 1]");
  require(repetition_penalty > 0.0 && std::isfinite(repetition_penalty), "repetition_penalty", repetition_penalty,
          "a positive number");
}

Sampler::Sampler(const SamplerOptions& options, std::int64_t vocabulary) : options_(options) {
  options_.validate();
  candidates_.reserve(static_cast<std::size_t>(vocabulary));
}

std::span<const Sampler::Candidate> Sampler::distribution(std::span<const float> logits,
                                                          std::span<const std::uint8_t> seen) {
  candidates_.clear();
  double largest = -std::numeric_limits<double>::infinity();
  for (std::size_t token = 0; token < logits.size(); ++token) {
    double logit = logits[token];
    if (std::isnan(logit)) throw Error("sampling: the logit of token " + std::to_string(token) + " is NaN");
    if (!seen.empty() && seen[token] != 0) {
      logit = logit > 0.0 ? logit / options_.repetition_penalty : logit * options_.repetition_penalty;
    }
    candidates_.push_back({static_cast<std::int32_t>(token), logit});
    largest = std::max(largest, logit);
  }
  if (!std::isfinite(largest)) throw Error("sampling: no logit is finite");

  if (options_.temperature == 0.0) {
    const Candidate best = *std::min_element(candidates_.begin(), candidates_.end(), more_likely);
    candidates_.assign(1, {best.token, 1.0});
    return candidates_;
  }
  for (Candidate& candidate : candidates_) {
    candidate.probability = std::exp((candidate.probability - largest) / options_.temperature);
  }
  const auto top_k = static_cast<std::size_t>(options_.top_k);
  if (top_k > 0 && top_k < candidates_.size()) {
    std::nth_element(candidates_.begin(), candidates_.begin() + static_cast<std::ptrdiff_t>(top_k) - 1,
                     candidates_.end(), more_likely);
    candidates_.resize(top_k);
  }
  if (options_.top_p < 1.0) {
    std::sort(candidates_.begin(), candidates_.end(), more_likely);
    normalize(candidates_);
    double reached = 0.0;
    std::size_t count = 0;
    while (count < candidates_.size() && reached < options_.top_p) reached += candidates_[count++].probability;
    candidates_.resize(std::max<std::size_t>(count, 1));
  }
  if (options_.min_p > 0.0) {
    const double best = std::min_element(candidates_.begin(), candidates_.end(), more_likely)->probability;
    std::erase_if(candidates_, [&](const Candidate& c) { return c.probability < options_.min_p * best; });
  }
  normalize(candidates_);
  return candidates_;
}

std::int32_t Sampler::sample(std::span<const float> logits, std::span<const std::uint8_t> seen, std::uint64_t sequence,
                             std::uint64_t position) {
  const auto candidates = distribution(logits, seen);
  const double draw = random::Stream(options_.seed, random::Use::sampling, sequence).uniform(position);
  double reached = 0.0;
  for (const Candidate& candidate : candidates) {
    reached += candidate.probability;
    if (draw < reached) return candidate.token;
  }
  // Rounding left the sum below the draw: the last that is possible at all.
  for (std::size_t i = candidates.size(); i-- > 0;) {
    if (candidates[i].probability > 0.0) return candidates[i].token;
  }
  return candidates.front().token;
}

}  // namespace flashgla::generate
