// Schedule and metrics: what needs no model.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "flashgla/base/error.h"
#include "flashgla/train/metrics.h"
#include "flashgla/train/schedule.h"
#include "testing/temporary_folder.h"

namespace flashgla::train {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(Schedule, WarmsUpThenFollowsTheCosine) {
  const Schedule schedule{.initial = 3e-5, .peak = 3e-4, .final = 3e-5, .warmup_steps = 100, .total_steps = 1101};
  EXPECT_DOUBLE_EQ(schedule.learning_rate(0), 3e-5);
  EXPECT_DOUBLE_EQ(schedule.learning_rate(50), 16.5e-5);
  EXPECT_DOUBLE_EQ(schedule.learning_rate(100), 3e-4);
  EXPECT_NEAR(schedule.learning_rate(350), 3e-5 + 13.5e-5 * (1.0 + std::sqrt(0.5)), 1e-15);  // a quarter of the way
  EXPECT_NEAR(schedule.learning_rate(600), 16.5e-5, 1e-15);
  EXPECT_NEAR(schedule.learning_rate(850), 3e-5 + 13.5e-5 * (1.0 - std::sqrt(0.5)), 1e-15);
  EXPECT_DOUBLE_EQ(schedule.learning_rate(1100), 3e-5);
  EXPECT_DOUBLE_EQ(schedule.learning_rate(5000), 3e-5);
  for (std::int64_t step = 0; step < 100; ++step)
    EXPECT_LT(schedule.learning_rate(step), schedule.learning_rate(step + 1));
  for (std::int64_t step = 100; step < 1100; ++step)
    EXPECT_GT(schedule.learning_rate(step), schedule.learning_rate(step + 1));
}

TEST(Schedule, WithoutWarmupOrRoomForTheCosine) {
  EXPECT_DOUBLE_EQ((Schedule{0.0, 1.0, 0.1, 0, 11}.learning_rate(0)), 1.0);
  EXPECT_DOUBLE_EQ((Schedule{0.0, 1.0, 0.1, 0, 11}.learning_rate(10)), 0.1);
  EXPECT_DOUBLE_EQ((Schedule{0.0, 1.0, 0.1, 0, 1}.learning_rate(0)), 1.0);
  EXPECT_DOUBLE_EQ((Schedule{0.0, 1.0, 0.1, 4, 4}.learning_rate(3)), 0.75);
}

class MetricsTest : public ::testing::Test {
 protected:
  static MetricsRow row(std::int64_t step) {
    MetricsRow result;
    result.step = step;
    result.tokens = step * 100;
    result.loss = 1.0 / 3.0 + static_cast<double>(step);
    return result;
  }

  flashgla::testing::TemporaryFolder folder_;
  std::filesystem::path path_ = folder_ / "metrics.jsonl";
};

TEST_F(MetricsTest, RoundTripIsExact) {
  {
    MetricsWriter writer(path_, 0);
    writer.write(row(1));
    MetricsRow eval = row(2);
    eval.kind = "eval";
    eval.bits_per_byte = 1.234567890123456789;
    writer.write(eval);
  }
  const auto rows = read_metrics(path_);
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0].kind, "train");
  EXPECT_EQ(rows[0].loss, 1.0 / 3.0 + 1.0);
  EXPECT_TRUE(std::isnan(rows[0].bits_per_byte));
  EXPECT_EQ(rows[1].kind, "eval");
  EXPECT_EQ(rows[1].tokens, 200);
  EXPECT_EQ(rows[1].bits_per_byte, 1.234567890123456789);
}

TEST_F(MetricsTest, ResumeDropsLaterRowsAndACutOffLine) {
  {
    MetricsWriter writer(path_, 0);
    for (std::int64_t step = 1; step <= 5; ++step) writer.write(row(step));
  }
  std::ofstream(path_, std::ios::app) << R"({"kind":"train","st)";
  EXPECT_EQ(read_metrics(path_).size(), 5u);
  {
    MetricsWriter writer(path_, 3);
    writer.write(row(4));
  }
  const auto rows = read_metrics(path_);
  ASSERT_EQ(rows.size(), 4u);
  EXPECT_EQ(rows[3].step, 4);
}

TEST_F(MetricsTest, BadLinesAndFilesAreNamed) {
  std::ofstream(path_) << "{\"kind\":\"train\",\"step\":1,\"tokens\":1}\nnonsense\n";
  EXPECT_THAT([&] { read_metrics(path_); }, ThrowsMessage<Error>(HasSubstr("metrics.jsonl: line 2")));
  EXPECT_THAT([&] { read_metrics(folder_ / "none"); }, ThrowsMessage<Error>(HasSubstr("none: cannot be read")));
  EXPECT_THAT([&] { MetricsWriter("/dev/full", 0).write(row(1)); },
              ThrowsMessage<Error>(HasSubstr("/dev/full: cannot be written: No space left on device")));
}

}  // namespace
}  // namespace flashgla::train
