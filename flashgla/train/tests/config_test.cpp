// Training configs: files, fields, units, errors, and the recipes of configs/.
#include "flashgla/train/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "flashgla/base/error.h"
#include "flashgla/base/memory.h"
#include "flashgla/base/quantities.h"
#include "flashgla/model/config.h"

namespace flashgla::train {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(TrainConfigTest, MemoryIsLimitedToSomething) {
  TrainConfig config;
  EXPECT_EQ(config.memory_limit_bytes(), 0u);
  config.memory_limit = "0GiB";
  EXPECT_THAT([&] { config.memory_limit_bytes(); }, ThrowsMessage<Error>(HasSubstr("memory_limit: '0GiB'")));
}

TEST(TrainConfigTest, FileAndFieldsRoundTrip) {
  TrainConfig config;
  parse_config(config, R"({"train_tokens": "1.6M", "learning_rate": 0.002, "model": {"hidden_size": 64}, "_": "note"})",
               "file");
  EXPECT_EQ(config.train_tokens, 1600000);
  EXPECT_EQ(config.learning_rate, 0.002);
  EXPECT_EQ(config.model, R"({"hidden_size":64})");
  set_field(config, "batch-tokens", "0.5M");
  EXPECT_EQ(config.batch_tokens, 500000);
  TrainConfig again;
  parse_config(again, to_json(config), "again");
  EXPECT_EQ(to_json(again), to_json(config));
}

TEST(TrainConfigTest, BadFieldsAreNamed) {
  const auto parse = [](const char* json) {
    return [json] {
      TrainConfig config;
      parse_config(config, json, "run.json");
    };
  };
  EXPECT_THAT(parse("{"), ThrowsMessage<Error>(HasSubstr("run.json: not JSON")));
  EXPECT_THAT(parse("[]"), ThrowsMessage<Error>(HasSubstr("run.json: expected a JSON object")));
  EXPECT_THAT(parse(R"({"model": "{"})"), ThrowsMessage<Error>(HasSubstr("model: not JSON")));
  TrainConfig braced;
  parse_config(braced, R"({"out": "{runs"})", "run.json");
  EXPECT_THAT(to_json(braced), HasSubstr(R"("out": "{runs")"));
  const std::string deep = "{\"seed\": " + std::string(50000, '[') + std::string(50000, ']') + "}";
  EXPECT_THAT(parse(deep.c_str()), ThrowsMessage<Error>(HasSubstr("nested deeper than 100")));
  EXPECT_THAT(parse(R"({"lr": 1})"), ThrowsMessage<Error>(HasSubstr("run.json: there is no training field 'lr'")));
  EXPECT_THAT(parse(R"({"learning_rate": true})"),
              ThrowsMessage<Error>(HasSubstr("learning_rate is true; expected a number")));
  EXPECT_THAT(parse(R"({"batch_tokens": 1.5})"),
              ThrowsMessage<Error>(HasSubstr("batch_tokens: '1.5' is not a whole number")));
  EXPECT_THAT(parse(R"({"train_tokens": "many"})"),
              ThrowsMessage<Error>(HasSubstr("train_tokens: 'many' is not a number")));
  EXPECT_THAT(parse(R"({"data": 3})"), ThrowsMessage<Error>(HasSubstr("data is 3; expected a string")));
}

// What is not itself in f32, in which updates are computed.
TEST(TrainConfigTest, TheOptimizersNumbersAreThoseOfF32) {
  const auto refusal = [](const char* name, const char* text) {
    return [=] {
      TrainConfig config;
      config.data = config.out = "x";
      set_field(config, name, text);
      config.validate();
    };
  };
  for (const char* beta : {"beta1", "beta2"}) {
    EXPECT_NO_THROW(refusal(beta, "0.9999999")());
    EXPECT_THAT(refusal(beta, "0.99999999999"), ThrowsMessage<Error>(HasSubstr(std::string(beta) + " is ")));
  }
  EXPECT_NO_THROW(refusal("epsilon", "2e-38")());
  for (const char* epsilon : {"1e-60", "1e-320", "0", "1e39"}) {
    EXPECT_THAT(refusal("epsilon", epsilon), ThrowsMessage<Error>(HasSubstr("expected a positive f32"))) << epsilon;
  }
}

TEST(TrainConfigTest, PathsThatTrainJsonCannotHoldAreRefused) {
  TrainConfig config;
  config.data = config.out = "x";
  EXPECT_NO_THROW(config.validate());
  config.out = "caf\xE9";
  EXPECT_THAT([&] { config.validate(); }, ThrowsMessage<Error>(HasSubstr("out is not UTF-8; expected")));
}

TEST(TrainConfigTest, DropoutIsOneNumberUnlessPartsHaveTheirOwn) {
  TrainConfig config;
  config.data = config.out = "somewhere";
  config.dropout = 0.2;
  EXPECT_EQ(config.resolved_attention_dropout(), 0.2);
  EXPECT_EQ(config.resolved_embedding_dropout(), 0.2);
  config.attention_dropout = 0.0;
  config.embedding_dropout = 0.1;
  EXPECT_EQ(config.resolved_attention_dropout(), 0.0);
  EXPECT_EQ(config.resolved_embedding_dropout(), 0.1);
  EXPECT_NO_THROW(config.validate());
  config.embedding_dropout = 1.5;
  EXPECT_THAT([&] { config.validate(); }, ThrowsMessage<Error>(HasSubstr("embedding_dropout is 1.5; expected")));
  config.embedding_dropout = 0.0;
  config.attention_dropout = -0.5;
  EXPECT_THAT([&] { config.validate(); }, ThrowsMessage<Error>(HasSubstr("attention_dropout is -0.5; expected")));
  config.attention_dropout = -1.0;
  config.dropout = 1.0;
  EXPECT_THAT([&] { config.validate(); }, ThrowsMessage<Error>(HasSubstr("dropout is 1; expected in [0, 1)")));
}

// Every recipe in configs/ names fields that there are and values that go together.
TEST(TrainConfigTest, RecipesAreValid) {
  int recipes = 0;
  for (const auto& entry : fs::directory_iterator(FLASHGLA_CONFIGS)) {
    SCOPED_TRACE(entry.path().string());
    TrainConfig config;
    config.data = "data";
    config.out = "out";
    load_config(config, entry.path().string());
    EXPECT_NO_THROW(config.validate());
    const bool written = config.model.starts_with("{");
    EXPECT_NO_THROW((written ? model::parse_config(config.model, "model") : model::preset(config.model)).validate());
    ++recipes;
  }
  EXPECT_GE(recipes, 4);
}

TEST(TrainConfigTest, ScheduleOfThePapersRecipe) {
  TrainConfig config;
  config.train_tokens = parse_count("15B");
  config.batch_tokens = 524288;
  config.sequence_length = 2048;
  config.warmup_tokens = parse_count("0.5B");
  const Schedule schedule = config.schedule();
  EXPECT_EQ(schedule.total_steps, 28611);
  EXPECT_EQ(schedule.warmup_steps, 954);
  EXPECT_DOUBLE_EQ(schedule.learning_rate(954), 3e-4);
}

}  // namespace
}  // namespace flashgla::train
