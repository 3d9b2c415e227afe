#include <gtest/gtest.h>

#include <cmath>
#include <limits>
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
                               std::int32_t position, const Options& options, Tensor* seen_after = nullptr) {
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
  if (seen_after) *seen_after = testing::copied_to(marks, Device::cpu());
  return {host.as<std::int32_t>(), host.as<std::int32_t>() + n};
}

TEST(Sampling, EveryImplementationDrawsTheSameTokens) {
  const std::vector<Options> many = {
      {1.0, 0, 1.0, 0.0, 1.0, 1}, {0.0, 0, 1.0, 0.0, 1.0, 1},     {0.7, 5, 1.0, 0.0, 1.0, 2},
      {1.3, 0, 0.9, 0.0, 1.0, 3}, {1.0, 0, 1.0, 0.05, 1.0, 4},    {0.8, 40, 0.95, 0.02, 1.2, 5},
      {1.0, 3, 0.5, 0.0, 0.7, 6}, {2.0, 1, 1.0, 0.0, 1.0, 7},     {1.0, 0, 1e-9, 0.0, 1.0, 8},
      {1.0, 0, 1.0, 1.0, 1.0, 9}, {1e-3, 0, 0.999, 0.0, 1.0, 10}, {1.0, 1 << 20, 0.999999, 0.0, 1.0, 11},
  };
  std::vector<std::pair<Device, const char*>> rows;
  for (const Device device : testing::test_devices()) {
    for (const Implementation& row : implementations()) {
      if (row.device == device.kind) rows.emplace_back(device, row.name);
    }
  }
  for (const std::int64_t vocabulary : {1, 2, 17, 258, 1000, 32000}) {
    for (int kind = 0; kind < 4; ++kind) {
      const Tensor logits = make_logits(3, vocabulary, kind);
      Tensor seen = Tensor::zeros({3, vocabulary}, DType::u8);
      for (std::int64_t i = 0; i < seen->numel(); i += 7) seen.as<std::uint8_t>()[i] = 1;
      for (const Options& options : many) {
        for (const std::int32_t position : {0, 12345}) {
          if (vocabulary > 1000 && (position == 0 || kind > 1)) continue;
          Tensor marks;
          const std::vector<std::int32_t> expected =
              draw(Device::cpu(), "reference", logits, seen, position, options, &marks);
          for (std::size_t n = 0; n < expected.size(); ++n) {
            const bool none = kind == 3 && vocabulary < 3 && expected[n] < 0;
            if (none) continue;
            ASSERT_GE(expected[n], 0);
            EXPECT_EQ(marks.as<std::uint8_t>()[static_cast<std::int64_t>(n) * vocabulary + expected[n]], 1);
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
