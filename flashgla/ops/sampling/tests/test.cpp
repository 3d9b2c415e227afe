#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <vector>

#include "flashgla/ops/sampling/implementations.h"
#include "flashgla/ops/sampling/weights.h"
#include "testing/conformance.h"
#include "testing/devices.h"
#include "testing/random.h"

namespace flashgla::ops::sampling {
namespace {

TEST(Sampling, WeightsAreTheExponential) {
  EXPECT_EQ(weight_of(0.0), std::uint64_t{1} << kWeightBits);
  EXPECT_EQ(weight_of(-40.0), 0u);
  EXPECT_EQ(weight_of(-std::numeric_limits<double>::infinity()), 0u);
  for (double x = 0.0; x > -29.0; x -= 0.00371) {
    const double expected = std::ldexp(std::exp(x), kWeightBits);
    EXPECT_NEAR(static_cast<double>(weight_of(x)), expected, 1.0 + 1e-13 * expected) << x;
  }
}

// Logits of several shapes: smooth, with many equal ones, one that is sure, with some impossible.
Tensor make_logits(std::int64_t sequences, std::int64_t vocabulary, int kind) {
  Tensor logits =
      testing::random_normal({sequences, vocabulary}, DType::f32, 11 + static_cast<std::uint64_t>(kind), 3.0);
  auto* values = logits.as<float>();
  for (std::int64_t i = 0; i < logits->numel(); ++i) {
    if (kind == 1) values[i] = std::round(values[i]);
    if (kind == 2 && i % vocabulary == vocabulary / 2) values[i] = 80.0f;
    if (kind == 3 && i % 3 != 0) values[i] = -std::numeric_limits<float>::infinity();
  }
  return logits;
}

std::vector<std::int32_t> draw(Device device, const char* implementation, const Tensor& logits, const Tensor& seen,
                               std::int32_t position, const Options& options) {
  Context context(device, 2);
  context.force_implementation(implementation);
  const std::int64_t n = logits->size(0);
  Tensor positions = Tensor::empty({n}, DType::i32);
  for (std::int64_t i = 0; i < n; ++i) positions.as<std::int32_t>()[i] = position;
  const Tensor there = testing::copied_to(logits, device), marks = testing::copied_to(seen, device);
  const Tensor places = testing::copied_to(positions, device), tokens = Tensor::empty({n}, DType::i32, device);
  run(context, there, marks, places, tokens, options, 5);
  context.queue().synchronize();
  const Tensor host = testing::copied_to(tokens, Device::cpu());
  return {host.as<std::int32_t>(), host.as<std::int32_t>() + n};
}

std::vector<std::pair<Device, const char*>> every_row() {
  std::vector<std::pair<Device, const char*>> rows;
  for (const Device device : testing::test_devices()) {
    for (const Implementation& row : implementations()) {
      if (row.device == device.kind) rows.emplace_back(device, row.name);
    }
  }
  return rows;
}

TEST(Sampling, EveryImplementationDrawsTheSameTokens) {
  const std::vector<Options> many = {
      {1.0, 0, 1.0, 0.0, 1.0, 1},    {0.0, 0, 1.0, 0.0, 1.0, 1},        {0.7, 5, 1.0, 0.0, 1.0, 2},
      {1.3, 0, 0.9, 0.0, 1.0, 3},    {1.0, 0, 1.0, 0.05, 1.0, 4},       {0.8, 40, 0.95, 0.02, 1.2, 5},
      {1.0, 3, 0.5, 0.0, 0.7, 6},    {2.0, 1, 1.0, 0.0, 1.0, 7},        {1.0, 0, 1e-9, 0.0, 1.0, 8},
      {1.0, 0, 1.0, 1.0, 1.0, 9},    {1e-3, 0, 0.999, 0.0, 1.0, 10},    {1.0, 1 << 20, 0.999999, 0.0, 1.0, 11},
      {1.0, 300, 0.9, 0.0, 1.0, 12}, {1.5, 3000, 0.99, 0.001, 1.0, 13},
  };
  const auto rows = every_row();
  for (const std::int64_t vocabulary : {1, 2, 17, 258, 1000, 32000}) {
    for (int kind = 0; kind < 4; ++kind) {
      const Tensor logits = make_logits(3, vocabulary, kind);
      Tensor seen = Tensor::zeros({3, vocabulary}, DType::u8);
      for (std::int64_t i = 0; i < seen->numel(); i += 7) seen.as<std::uint8_t>()[i] = 1;
      for (const Options& options : many) {
        for (const std::int32_t position : {0, 12345}) {
          if (vocabulary > 1000 && (position == 0 || kind > 1)) continue;
          const std::vector<std::int32_t> expected = draw(Device::cpu(), "reference", logits, seen, position, options);
          for (const std::int32_t token : expected) {
            if (kind != 3 || vocabulary > 3) {
              ASSERT_GE(token, 0);
            }
          }
          for (const auto& [device, name] : rows) {
            EXPECT_EQ(draw(device, name, logits, seen, position, options), expected)
                << name << ", V " << vocabulary << ", kind " << kind << ", seed " << options.seed;
          }
        }
      }
    }
  }
}

// Any filters together, with cuts among equal weights and from one kept token to all of them.
TEST(Sampling, DrawnOptionsGiveTheSameTokens) {
  std::uint64_t drawn = 0;
  const auto uniform = [&] { return testing::uniform(21, drawn++); };
  const auto rows = every_row();
  for (std::uint64_t problem = 0; problem < 200; ++problem) {
    const auto vocabulary = static_cast<std::int64_t>(std::exp(uniform() * std::log(6000.0)));
    const Tensor logits = make_logits(2, vocabulary, static_cast<int>(problem % 4));
    const Tensor seen = Tensor::zeros({2, vocabulary}, DType::u8);
    Options options{.temperature = std::exp(3.0 * uniform() - 1.5), .seed = problem};
    if (uniform() < 0.6) options.top_k = 1 + static_cast<std::int64_t>(std::exp(uniform() * 8.0));
    if (uniform() < 0.6) options.top_p = 1.0 - std::pow(uniform(), 3.0);
    if (uniform() < 0.4) options.min_p = std::pow(uniform(), 4.0);
    const auto position = static_cast<std::int32_t>(problem);
    const auto expected = draw(Device::cpu(), "reference", logits, seen, position, options);
    for (const auto& [device, name] : rows) {
      EXPECT_EQ(draw(device, name, logits, seen, position, options), expected)
          << name << ", V " << vocabulary << ", problem " << problem;
    }
  }
}

TEST(Sampling, SaysWhyNothingCanBeDrawn) {
  Tensor logits = make_logits(4, 600, 0);
  auto* values = logits.as<float>();
  values[599] = std::numeric_limits<float>::quiet_NaN();
  for (int i = 0; i < 600; ++i) values[600 + i] = -std::numeric_limits<float>::infinity();
  values[1200 + 17] = std::numeric_limits<float>::infinity();
  const Tensor seen = Tensor::zeros({4, 600}, DType::u8);
  for (const Device device : testing::test_devices()) {
    for (const Implementation& row : implementations()) {
      if (row.device != device.kind) continue;
      for (const double temperature : {0.0, 1.0}) {
        const auto tokens = draw(device, row.name, logits, seen, 0, {temperature});
        EXPECT_EQ(tokens[0], kNotANumber) << row.name;
        EXPECT_EQ(tokens[1], kNoneFinite) << row.name;
        EXPECT_EQ(tokens[2], kNoneFinite) << row.name;
        EXPECT_GE(tokens[3], 0) << row.name;
      }
    }
  }
}

TEST(Sampling, MarksTokensAsSeen) {
  const std::vector<std::int32_t> ids = {4, 0, 2, 9, -1, 2}, ends = {0, 2, 2, 6};
  for (const Device device : testing::test_devices()) {
    Context context(device, 2);
    const auto there = [&](const std::vector<std::int32_t>& values, std::size_t count) {
      return testing::copied_to(
          TensorView(const_cast<std::int32_t*>(values.data()), Shape({static_cast<std::int64_t>(count)})), device);
    };
    const auto marked = [&](const TensorView& tokens, const TensorView& bounds) {
      const Tensor seen = Tensor::zeros({3, 5}, DType::u8, device);
      mark_seen(context, tokens, bounds, seen);
      context.queue().synchronize();
      const Tensor host = testing::copied_to(seen, Device::cpu());
      return std::vector<int>(host.as<std::uint8_t>(), host.as<std::uint8_t>() + 15);
    };
    EXPECT_EQ(marked(there(ids, 6), there(ends, 4)), (std::vector<int>{1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0}));
    EXPECT_EQ(marked(there(ids, 3), {}), (std::vector<int>{0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0}));
  }
}

const std::vector<float> kLogits = {1.0f, 3.0f, 0.5f, -2.0f, 2.0f, 3.0f, -std::numeric_limits<float>::infinity(), 0.0f};

std::map<std::int32_t, double> probabilities(const Options& options, const std::vector<float>& logits,
                                             const std::vector<std::uint8_t>& seen = {}) {
  const Shape shape({static_cast<std::int64_t>(logits.size())});
  const Tensor weights = Tensor::empty(shape, DType::i64);
  const TensorView marks =
      seen.empty() ? TensorView() : TensorView(const_cast<std::uint8_t*>(seen.data()), DType::u8, shape);
  EXPECT_TRUE(distribution(TensorView(const_cast<float*>(logits.data()), shape), marks, weights, options));
  double total = 0.0;
  for (std::size_t i = 0; i < logits.size(); ++i) total += static_cast<double>(weights.as<std::int64_t>()[i]);
  std::map<std::int32_t, double> result;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const auto weight = static_cast<double>(weights.as<std::int64_t>()[i]);
    if (weight > 0.0) result[static_cast<std::int32_t>(i)] = weight / total;
  }
  return result;
}

// The draws of `sequences` sequences at a position.
std::vector<std::int32_t> draws(const Options& options, const std::vector<float>& logits, std::int64_t sequences,
                                std::int32_t position) {
  Context context(Device::cpu(), 1);
  const auto vocabulary = static_cast<std::int64_t>(logits.size());
  const Tensor rows = Tensor::empty({sequences, vocabulary}, DType::f32);
  const Tensor positions = Tensor::empty({sequences}, DType::i32), tokens = Tensor::empty({sequences}, DType::i32);
  for (std::int64_t n = 0; n < sequences; ++n) {
    std::copy(logits.begin(), logits.end(), rows.as<float>() + n * vocabulary);
    positions.as<std::int32_t>()[n] = position;
  }
  run(context, rows, {}, positions, tokens, options);
  return {tokens.as<std::int32_t>(), tokens.as<std::int32_t>() + sequences};
}

std::vector<double> softmax(const std::vector<float>& logits, double temperature) {
  std::vector<double> p;
  double total = 0.0;
  for (float logit : logits) total += p.emplace_back(std::exp(logit / temperature));
  for (double& value : p) value /= total;
  return p;
}

TEST(Sampling, DistributionIsSoftmaxOverTemperature) {
  for (double temperature : {0.25, 1.0, 3.0}) {
    const auto expected = softmax(kLogits, temperature);
    const auto actual = probabilities({.temperature = temperature}, kLogits);
    ASSERT_EQ(actual.size(), kLogits.size() - 1);  // but the impossible one
    for (const auto& [token, p] : actual) EXPECT_NEAR(p, expected[static_cast<std::size_t>(token)], 1e-12);
  }
}

// Chi-square of 40,000 draws against the exact probabilities. Cells expected less than 5 times are merged; the bound is
// the 0.999 quantile for the degrees of freedom (Wilson and Hilferty's approximation).
TEST(Sampling, DrawsFollowTheDistribution) {
  for (const Options& options :
       {Options{.seed = 1}, Options{.temperature = 2.0, .seed = 2}, Options{.top_k = 3, .seed = 3},
        Options{.temperature = 1.5, .top_p = 0.9, .seed = 4}, Options{.min_p = 0.1, .seed = 5}}) {
    const auto exact = probabilities(options, kLogits);
    constexpr int kSequences = 7, kPositions = 5714, kDraws = kSequences * kPositions;
    std::map<std::int32_t, int> counts;
    for (std::int32_t position = 0; position < kPositions; ++position) {
      for (const std::int32_t token : draws(options, kLogits, kSequences, position)) ++counts[token];
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

TEST(Sampling, DrawDependsOnSeedSequenceAndPositionOnly) {
  int differing_seed = 0;
  int differing_sequence = 0;
  for (std::int32_t position = 0; position < 200; ++position) {
    const auto tokens = draws({.seed = 9}, kLogits, 2, position);
    EXPECT_EQ(tokens[0], draws({.seed = 9}, kLogits, 1, position)[0]);
    differing_seed += tokens[0] != draws({.seed = 10}, kLogits, 1, position)[0];
    differing_sequence += tokens[0] != tokens[1];
  }
  EXPECT_GT(differing_seed, 50);
  EXPECT_GT(differing_sequence, 50);
}

TEST(Sampling, GreedyTakesTheFirstOfTheMostLikely) {
  for (std::int32_t position = 0; position < 20; ++position) {
    EXPECT_EQ(draws({.temperature = 0.0}, kLogits, 1, position)[0], 1);
  }
}

TEST(Sampling, GreedyIsTheFirstLargestLogitAfterThePenalty) {
  constexpr std::int64_t kVocabulary = 300;
  const Tensor seen = Tensor::zeros({1, kVocabulary}, DType::u8);
  for (int i = 0; i < kVocabulary; i += 3) seen.as<std::uint8_t>()[i] = 1;
  for (int shape = 0; shape < 4; ++shape) {
    Tensor logits = make_logits(1, kVocabulary, 5);
    auto* values = logits.as<float>();
    for (int i = 0; i < kVocabulary; ++i) {
      if (shape == 1) values[i] = -std::abs(values[i]) - 1.0f;
      if (shape == 2) values[i] = i % 7 == 3 ? -0.0f : i % 7 == 5 ? 0.0f : -1.0f;  // equal, in this order
      if (shape == 3) values[i] = i == 200 ? -1.0f : -std::numeric_limits<float>::infinity();
    }
    for (const double penalty : {1.0, 1.5}) {
      std::int64_t first = 0;
      const auto logit = [&](std::int64_t i) {
        const double l = static_cast<double>(values[i]);
        return i % 3 != 0 || penalty == 1.0 ? l : l > 0.0 ? l / penalty : l * penalty;
      };
      for (std::int64_t i = 1; i < kVocabulary; ++i) {
        if (logit(i) > logit(first)) first = i;
      }
      for (const Device device : testing::test_devices()) {
        for (const Implementation& row : implementations()) {
          if (row.device != device.kind) continue;
          const auto tokens =
              draw(device, row.name, logits, seen, 0, {.temperature = 0.0, .repetition_penalty = penalty});
          EXPECT_EQ(tokens[0], first) << row.name << " shape " << shape << " penalty " << penalty;
        }
      }
    }
  }
}

TEST(Sampling, TopK) {
  const auto two = probabilities({.top_k = 2}, kLogits);
  EXPECT_EQ(two.size(), 2u);
  EXPECT_NEAR(two.at(1), 0.5, 1e-12);
  EXPECT_NEAR(two.at(5), 0.5, 1e-12);
  EXPECT_EQ(probabilities({.top_k = 1}, kLogits).count(1), 1u);  // of equals the lower
  EXPECT_EQ(probabilities({.top_k = 100}, kLogits).size(), kLogits.size() - 1);
}

TEST(Sampling, TopPKeepsTheSmallestSetThatReachesP) {
  const std::vector<float> logits = {std::log(0.5f), std::log(0.3f), std::log(0.15f), std::log(0.05f)};
  EXPECT_EQ(probabilities({.top_p = 0.49}, logits).size(), 1u);
  EXPECT_EQ(probabilities({.top_p = 0.51}, logits).size(), 2u);
  EXPECT_EQ(probabilities({.top_p = 0.9}, logits).size(), 3u);
  EXPECT_EQ(probabilities({.top_p = 0.96}, logits).size(), 4u);
  EXPECT_EQ(probabilities({.top_p = 1e-9}, logits).size(), 1u);
  EXPECT_NEAR(probabilities({.top_p = 0.51}, logits).at(0), 0.5 / 0.8, 1e-6);
}

TEST(Sampling, MinPIsRelativeToTheMostLikely) {
  const std::vector<float> logits = {std::log(0.5f), std::log(0.3f), std::log(0.15f), std::log(0.05f)};
  EXPECT_EQ(probabilities({.min_p = 0.5}, logits).size(), 2u);
  EXPECT_EQ(probabilities({.min_p = 0.2}, logits).size(), 3u);
  EXPECT_EQ(probabilities({.min_p = 1.0}, logits).size(), 1u);
}

TEST(Sampling, FiltersApplyInOrder) {
  // Temperature 2 flattens (0.7, 0.2, 0.1) to (0.523, 0.279, 0.198); top-k 2 renormalises to (0.652, 0.348), of which
  // top-p 0.6 leaves one.
  const std::vector<float> logits = {std::log(0.7f), std::log(0.2f), std::log(0.1f)};
  EXPECT_EQ(probabilities({.temperature = 2.0, .top_k = 2, .top_p = 0.6}, logits).size(), 1u);
  EXPECT_EQ(probabilities({.temperature = 2.0, .top_p = 0.6}, logits).size(), 2u);
}

TEST(Sampling, RepetitionPenalty) {
  const std::vector<float> logits = {2.0f, -1.0f, 1.0f};
  const auto actual = probabilities({.repetition_penalty = 2.0}, logits, {1, 1, 0});
  const auto expected = softmax({1.0f, -2.0f, 1.0f}, 1.0);
  for (const auto& [token, p] : actual) EXPECT_NEAR(p, expected[static_cast<std::size_t>(token)], 1e-12);
}

TEST(Sampling, RefusesWhatMakesNoSense) {
  const auto error = [](const Options& options) { return testing::error_of([&] { options.validate(); }); };
  EXPECT_EQ(error({.temperature = -1.0}), "sampling: temperature is -1; expected 0 (greedy) or more");
  EXPECT_EQ(error({.top_k = -1}), "sampling: top_k is -1; expected 0 (all) or more");
  EXPECT_EQ(error({.top_p = 0.0}), "sampling: top_p is 0; expected in (0, 1]");
  EXPECT_EQ(error({.min_p = 2.0}), "sampling: min_p is 2; expected in [0, 1]");
  EXPECT_EQ(error({.repetition_penalty = 0.0}), "sampling: repetition_penalty is 0; expected a positive number");
}

TEST(Sampling, RefusesBadArgumentsByName) {
  Context context;
  const Tensor logits = Tensor::zeros({2, 5}, DType::f32), tokens = Tensor::zeros({2}, DType::i32);
  const Tensor wrong = Tensor::zeros({3}, DType::i32);
  const auto error = [&](const TensorView& seen, const TensorView& positions, const Options& options) {
    return testing::error_of([&] { run(context, logits, seen, positions, tokens, options); });
  };
  EXPECT_EQ(error({}, tokens, {}), "no error");
  EXPECT_EQ(error({}, wrong, {}), "sampling: positions has shape [3]; expected [2] (as logits' rows)");
  EXPECT_EQ(error(logits, tokens, {}), "sampling: seen has dtype f32; expected u8");
  EXPECT_EQ(error({}, tokens, {-1.0}), "sampling: temperature is -1; expected 0 (greedy) or more");
}

}  // namespace
}  // namespace flashgla::ops::sampling
