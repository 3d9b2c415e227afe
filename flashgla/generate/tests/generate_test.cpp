// Sampling against exact probabilities, and stop strings.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>

#include "flashgla/base/error.h"
#include "flashgla/generate/sampler.h"
#include "flashgla/generate/stop.h"

namespace flashgla::generate {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

const std::vector<float> kLogits = {1.0f, 3.0f, 0.5f, -2.0f, 2.0f, 3.0f, -std::numeric_limits<float>::infinity(), 0.0f};

std::map<std::int32_t, double> distribution(const SamplerOptions& options, const std::vector<float>& logits,
                                            const std::vector<std::uint8_t>& seen = {}) {
  Sampler sampler(options, static_cast<std::int64_t>(logits.size()));
  std::map<std::int32_t, double> result;
  for (const auto& candidate : sampler.distribution(logits, seen)) result[candidate.token] = candidate.probability;
  return result;
}

std::vector<double> softmax(const std::vector<float>& logits, double temperature) {
  std::vector<double> p;
  double total = 0.0;
  for (float logit : logits) total += p.emplace_back(std::exp(logit / temperature));
  for (double& value : p) value /= total;
  return p;
}

TEST(Sampler, DistributionIsSoftmaxOverTemperature) {
  for (double temperature : {0.25, 1.0, 3.0}) {
    const auto expected = softmax(kLogits, temperature);
    const auto actual = distribution({.temperature = temperature}, kLogits);
    ASSERT_EQ(actual.size(), kLogits.size());
    for (const auto& [token, p] : actual) EXPECT_NEAR(p, expected[static_cast<std::size_t>(token)], 1e-12);
  }
}

// Chi-square of 40,000 draws against the exact probabilities. Cells expected less than 5 times are merged; the bound is
// the 0.999 quantile for the degrees of freedom (Wilson and Hilferty's approximation).
TEST(Sampler, DrawsFollowTheDistribution) {
  for (const SamplerOptions& options :
       {SamplerOptions{.seed = 1}, SamplerOptions{.temperature = 2.0, .seed = 2}, SamplerOptions{.top_k = 3, .seed = 3},
        SamplerOptions{.temperature = 1.5, .top_p = 0.9, .seed = 4}, SamplerOptions{.min_p = 0.1, .seed = 5}}) {
    Sampler sampler(options, static_cast<std::int64_t>(kLogits.size()));
    const auto exact = distribution(options, kLogits);
    constexpr int kDraws = 40000;
    std::map<std::int32_t, int> counts;
    for (int i = 0; i < kDraws; ++i) {
      ++counts[sampler.sample(kLogits, {}, static_cast<std::uint64_t>(i % 7), static_cast<std::uint64_t>(i / 7))];
    }
    double chi = 0.0;
    double small_expected = 0.0;
    double small_count = 0.0;
    int cells = 0;
    for (const auto& [token, p] : exact) {
      const double expected = p * kDraws;
      const double count = counts[token];
      counts.erase(token);
      if (expected < 5.0) {
        small_expected += expected;
        small_count += count;
        continue;
      }
      chi += (count - expected) * (count - expected) / expected;
      ++cells;
    }
    for (const auto& [token, count] : counts) EXPECT_EQ(count, 0) << "token " << token << " has probability 0";
    if (small_expected > 0.5) {
      chi += (small_count - small_expected) * (small_count - small_expected) / small_expected;
      ++cells;
    }
    const double freedom = cells - 1;
    const double z = 3.09;
    const double bound = freedom * std::pow(1.0 - 2.0 / (9.0 * freedom) + z * std::sqrt(2.0 / (9.0 * freedom)), 3.0);
    EXPECT_LT(chi, bound) << "seed " << options.seed;
  }
}

TEST(Sampler, DrawDependsOnSeedSequenceAndPositionOnly) {
  Sampler a({.seed = 9}, 8);
  Sampler b({.seed = 9}, 8);
  b.sample(kLogits, {}, 3, 3);
  int differing_seed = 0;
  int differing_sequence = 0;
  Sampler other({.seed = 10}, 8);
  for (std::uint64_t i = 0; i < 200; ++i) {
    const auto token = a.sample(kLogits, {}, 0, i);
    EXPECT_EQ(token, b.sample(kLogits, {}, 0, i));
    differing_seed += token != other.sample(kLogits, {}, 0, i);
    differing_sequence += token != a.sample(kLogits, {}, 1, i);
  }
  EXPECT_GT(differing_seed, 50);
  EXPECT_GT(differing_sequence, 50);
}

TEST(Sampler, GreedyTakesTheFirstOfTheMostLikely) {
  Sampler sampler({.temperature = 0.0}, 8);
  for (std::uint64_t i = 0; i < 20; ++i) EXPECT_EQ(sampler.sample(kLogits, {}, 0, i), 1);
}

TEST(Sampler, TopK) {
  const auto two = distribution({.top_k = 2}, kLogits);
  EXPECT_EQ(two.size(), 2u);
  EXPECT_NEAR(two.at(1), 0.5, 1e-12);
  EXPECT_NEAR(two.at(5), 0.5, 1e-12);
  EXPECT_EQ(distribution({.top_k = 1}, kLogits).count(1), 1u);  // of equals the lower
  EXPECT_EQ(distribution({.top_k = 100}, kLogits).size(), kLogits.size());
}

TEST(Sampler, TopPKeepsTheSmallestSetThatReachesP) {
  const std::vector<float> logits = {std::log(0.5f), std::log(0.3f), std::log(0.15f), std::log(0.05f)};
  EXPECT_EQ(distribution({.top_p = 0.49}, logits).size(), 1u);
  EXPECT_EQ(distribution({.top_p = 0.51}, logits).size(), 2u);
  EXPECT_EQ(distribution({.top_p = 0.9}, logits).size(), 3u);
  EXPECT_EQ(distribution({.top_p = 0.96}, logits).size(), 4u);
  EXPECT_EQ(distribution({.top_p = 1e-9}, logits).size(), 1u);
  EXPECT_NEAR(distribution({.top_p = 0.51}, logits).at(0), 0.5 / 0.8, 1e-6);
}

TEST(Sampler, MinPIsRelativeToTheMostLikely) {
  const std::vector<float> logits = {std::log(0.5f), std::log(0.3f), std::log(0.15f), std::log(0.05f)};
  EXPECT_EQ(distribution({.min_p = 0.5}, logits).size(), 2u);
  EXPECT_EQ(distribution({.min_p = 0.2}, logits).size(), 3u);
  EXPECT_EQ(distribution({.min_p = 1.0}, logits).size(), 1u);
}

TEST(Sampler, FiltersApplyInOrder) {
  // Temperature 2 flattens (0.7, 0.2, 0.1) to (0.523, 0.279, 0.198); top-k 2 renormalises to (0.652, 0.348), of which
  // top-p 0.6 leaves one.
  const std::vector<float> logits = {std::log(0.7f), std::log(0.2f), std::log(0.1f)};
  EXPECT_EQ(distribution({.temperature = 2.0, .top_k = 2, .top_p = 0.6}, logits).size(), 1u);
  EXPECT_EQ(distribution({.temperature = 2.0, .top_p = 0.6}, logits).size(), 2u);
}

TEST(Sampler, RepetitionPenalty) {
  const std::vector<float> logits = {2.0f, -1.0f, 1.0f};
  const auto actual = distribution({.repetition_penalty = 2.0}, logits, {1, 1, 0});
  const auto expected = softmax({1.0f, -2.0f, 1.0f}, 1.0);
  for (const auto& [token, p] : actual) EXPECT_NEAR(p, expected[static_cast<std::size_t>(token)], 1e-12);
}

TEST(Sampler, RefusesWhatMakesNoSense) {
  EXPECT_THAT([] { Sampler({.temperature = -1.0}, 8); }, ThrowsMessage<Error>(HasSubstr("temperature is -1")));
  EXPECT_THAT([] { Sampler({.top_p = 0.0}, 8); }, ThrowsMessage<Error>(HasSubstr("top_p")));
  EXPECT_THAT([] { Sampler({.top_k = -1}, 8); }, ThrowsMessage<Error>(HasSubstr("top_k")));
  EXPECT_THAT([] { Sampler({.min_p = 2.0}, 8); }, ThrowsMessage<Error>(HasSubstr("min_p")));
  EXPECT_THAT([] { Sampler({.repetition_penalty = 0.0}, 8); }, ThrowsMessage<Error>(HasSubstr("repetition_penalty")));
  Sampler sampler({}, 2);
  EXPECT_THAT(
      [&] {
        sampler.sample(std::vector<float>{0.0f, NAN}, {}, 0, 0);
      },
      ThrowsMessage<Error>(HasSubstr("token 1 is NaN")));
}

// Feeds `text` in pieces of every size and returns what is shown, which must not depend on the cut.
std::string shown(const std::vector<std::string>& stops, const std::string& text, bool* stopped = nullptr) {
  std::string first;
  for (std::size_t size = 1; size <= text.size() + 1; ++size) {
    StopMatcher matcher(stops);
    std::string out;
    for (std::size_t i = 0; i < text.size(); i += size) out += matcher.push(std::string_view(text).substr(i, size));
    if (stopped != nullptr) *stopped = matcher.stopped();
    if (!matcher.stopped()) out += matcher.finish();
    if (size == 1) first = out;
    EXPECT_EQ(out, first) << "pieces of " << size;
  }
  return first;
}

TEST(StopMatcher, MatchesAcrossPiecesAndNeverShowsTheStop) {
  bool stopped = false;
  EXPECT_EQ(shown({"END"}, "some text END more", &stopped), "some text ");
  EXPECT_TRUE(stopped);
  EXPECT_EQ(shown({"\n\n"}, "a\nb\n\nc"), "a\nb");
  EXPECT_EQ(shown({"aab"}, "aaaab!"), "aa");
  EXPECT_EQ(shown({"abab", "xyz"}, "abaxyabxyz"), "abaxyab");
  EXPECT_EQ(shown({"END"}, "ENDless"), "");
}

TEST(StopMatcher, ShowsEverythingWithoutAMatch) {
  bool stopped = true;
  EXPECT_EQ(shown({"END", "EN!"}, "EN EEN EN", &stopped), "EN EEN EN");
  EXPECT_FALSE(stopped);
  EXPECT_EQ(shown({}, "all of it"), "all of it");
}

TEST(StopMatcher, HoldsBackNoMoreThanItMust) {
  StopMatcher matcher({"</s>"});
  EXPECT_EQ(matcher.push("a < b"), "a < b");
  EXPECT_EQ(matcher.push("<"), "");
  EXPECT_EQ(matcher.push("/"), "");
  EXPECT_EQ(matcher.push("p>"), "</p>");
  EXPECT_EQ(matcher.push("</s"), "");
  EXPECT_EQ(matcher.finish(), "</s");
}

TEST(StopMatcher, EarliestEndWins) {
  EXPECT_EQ(shown({"bcd", "c"}, "abcd"), "ab");
  EXPECT_EQ(shown({"c", "bc"}, "abcd"), "a");
}

TEST(StopMatcher, RefusesAnEmptyStop) { EXPECT_THROW(StopMatcher({"a", ""}), Error); }

}  // namespace
}  // namespace flashgla::generate
