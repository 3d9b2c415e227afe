#include "flashgla/data/recall.h"

#include <gmock/gmock.h>

#include <cmath>
#include <map>
#include <set>

#include "flashgla/base/file.h"
#include "flashgla/data/dataset.h"
#include "flashgla/data/loader.h"
#include "flashgla/data/tests/test_folder.h"

namespace flashgla::data {
namespace {

using ::testing::HasSubstr;

class Recall : public FolderTest {
 protected:
  RecallOptions options(const std::string& name) const {
    RecallOptions result;
    result.vocabulary = 100;
    result.length = 32;
    result.pairs = 5;
    result.train = 400;
    result.validation = 7;
    result.out = path(name);
    return result;
  }
  static std::vector<std::int32_t> document(const TokenFile& file, std::int64_t i) {
    const std::int64_t begin = file.document_begins()[static_cast<std::size_t>(i)];
    std::vector<std::int32_t> ids(
        static_cast<std::size_t>(file.document_begins()[static_cast<std::size_t>(i) + 1] - begin));
    file.read(begin, static_cast<std::int64_t>(ids.size()), ids.data());
    return ids;
  }
};

TEST_F(Recall, SequencesAreTheTask) {
  for (const bool fillers : {false, true}) {
    RecallOptions wanted = options(fillers ? "random" : "zeros");
    wanted.random_fillers = fillers;
    write_recall(wanted);
    const Dataset dataset = open_dataset(wanted.out);
    EXPECT_EQ(dataset.vocab_size, 100);
    EXPECT_EQ(dataset.tokenizer, nullptr);
    EXPECT_EQ(dataset.train.file->documents(), 400);
    EXPECT_EQ(dataset.validation.file->documents(), 7);
    std::set<std::vector<std::int32_t>> different;
    for (std::int64_t i = 0; i < 400; ++i) {
      const auto tokens = document(*dataset.train.file, i), labels = document(*dataset.train.labels, i);
      ASSERT_EQ(tokens.size(), 32u);
      ASSERT_EQ(labels.size(), 10u);
      different.insert(tokens);
      std::map<std::int32_t, std::int32_t> pairs;
      std::set<std::int32_t> values;
      for (std::size_t pair = 0; pair < 5; ++pair) {
        ASSERT_TRUE(tokens[2 * pair] >= 1 && tokens[2 * pair] < 50);
        ASSERT_TRUE(tokens[2 * pair + 1] >= 50 && tokens[2 * pair + 1] < 100);
        pairs[tokens[2 * pair]] = tokens[2 * pair + 1];
        values.insert(tokens[2 * pair + 1]);
      }
      ASSERT_EQ(pairs.size(), 5u);
      ASSERT_EQ(values.size(), 5u);
      std::set<std::int32_t> asked;
      for (std::size_t label = 0; label < 5; ++label) {
        const std::int32_t place = labels[2 * label];
        ASSERT_TRUE(place >= 10 && place % 2 == 0 && (label == 0 || place > labels[2 * label - 2]));
        const std::int32_t key = tokens[static_cast<std::size_t>(place)];
        ASSERT_EQ(pairs.at(key), labels[2 * label + 1]);
        asked.insert(key);
      }
      ASSERT_EQ(asked.size(), 5u);
      const auto zeros = std::count(tokens.begin() + 10, tokens.end(), 0);
      ASSERT_EQ(fillers ? zeros < 17 : zeros == 17, true);
    }
    EXPECT_EQ(different.size(), 400u);
  }
}

TEST_F(Recall, EqualSeedsGiveEqualTasks) {
  RecallOptions a = options("a"), b = options("b"), c = options("c");
  b.train = 20;  // a sequence does not depend on how many there are
  c.seed = 1;
  for (const RecallOptions& each : {a, b, c}) write_recall(each);
  EXPECT_EQ(read_file(a.out + "/validation.bin"), read_file(b.out + "/validation.bin"));
  EXPECT_EQ(read_file(a.out + "/train.bin").substr(0, 20 * 64), read_file(b.out + "/train.bin"));
  EXPECT_NE(read_file(a.out + "/train.bin"), read_file(c.out + "/train.bin"));
}

// The first query stands at slot s in proportion to (s+1)^(power-1).
TEST_F(Recall, QueriesCrowdToTheFrontAsThePowerSays) {
  for (const double power : {0.01, 1.0}) {
    RecallOptions wanted = options("power" + std::to_string(power));
    wanted.pairs = 1;
    wanted.power = power;
    wanted.train = 20'000;
    write_recall(wanted);
    const Dataset dataset = open_dataset(wanted.out);
    std::vector<double> counts(15, 0.0);
    for (std::int64_t i = 0; i < wanted.train; ++i) {
      counts[static_cast<std::size_t>(document(*dataset.train.labels, i)[0] - 2) / 2] += 1.0;
    }
    double total = 0.0;
    for (int slot = 0; slot < 15; ++slot) total += std::pow(slot + 1, power - 1.0);
    for (int slot = 0; slot < 15; ++slot) {
      const double share = std::pow(slot + 1, power - 1.0) / total, expected = share * 20'000;
      EXPECT_NEAR(counts[static_cast<std::size_t>(slot)], expected, 4.5 * std::sqrt(expected * (1.0 - share)));
    }
  }
}

TEST_F(Recall, LoaderGivesWholeSequencesAndTheirLabels) {
  RecallOptions wanted = options("task");
  wanted.train = 10;
  write_recall(wanted);
  const Dataset dataset = open_dataset(wanted.out);
  LoaderConfig config{.mode = LoaderMode::labelled, .batch = 4, .length = 32, .shuffle = false, .single_pass = true};
  Loader loader(dataset.train, config);
  EXPECT_EQ(loader.labels(), 5);
  Batch batch;
  std::int64_t row = 0, targets = 0;
  while (loader.next(batch)) {
    ASSERT_EQ(batch.places.shape, Shape({20}));
    ASSERT_EQ(batch.targets.shape, Shape({20}));
    targets += batch.target_count;
    for (std::int64_t i = 0; i < 20; ++i) {
      const std::int32_t place = batch.places.as<std::int32_t>()[i], target = batch.targets.as<std::int32_t>()[i];
      ASSERT_EQ(place / 32, i / 5);
      ASSERT_TRUE(i == 0 || place > batch.places.as<std::int32_t>()[i - 1]);
      if (row + i / 5 >= 10) {
        ASSERT_EQ(target, -1);
      } else {
        ASSERT_EQ(target, document(*dataset.train.labels, row + i / 5)[static_cast<std::size_t>(2 * (i % 5) + 1)]);
        ASSERT_EQ(batch.tokens.as<std::int32_t>()[place],
                  document(*dataset.train.file, row + i / 5)[static_cast<std::size_t>(place % 32)]);
      }
    }
    row += 4;
  }
  EXPECT_EQ(row, 12);
  EXPECT_EQ(targets, 50);

  // Endless: goes on exactly from a saved state.
  config.shuffle = true;
  config.single_pass = false;
  Loader whole(dataset.train, config), other(dataset.train, config);
  for (int i = 0; i < 7; ++i) ASSERT_TRUE(whole.next(batch));
  other.restore(whole.save_state());
  Batch again;
  for (int i = 0; i < 7; ++i) {
    ASSERT_TRUE(whole.next(batch) && other.next(again));
    ASSERT_TRUE(std::equal(batch.places.as<std::int32_t>(), batch.places.as<std::int32_t>() + 20,
                           again.places.as<std::int32_t>()));
  }
}

TEST_F(Recall, RefusesWhatIsImpossibleByName) {
  const auto refusal = [&](auto change) {
    RecallOptions wanted = options("refused");
    change(wanted);
    return error_of([&] { write_recall(wanted); });
  };
  EXPECT_THAT(refusal([](RecallOptions& o) { o.pairs = 9; }), HasSubstr("length is 32; expected at least 36"));
  EXPECT_THAT(refusal([](RecallOptions& o) { o.pairs = 0; }), HasSubstr("pairs is 0"));
  EXPECT_THAT(refusal([](RecallOptions& o) { o.length = 33; }), HasSubstr("length is 33; expected an even number"));
  EXPECT_THAT(refusal([](RecallOptions& o) { o.vocabulary = 32; }), HasSubstr("vocabulary is 32; expected more than"));
  EXPECT_THAT(refusal([](RecallOptions& o) { o.power = 0.0; }), HasSubstr("power is 0"));
  EXPECT_THAT(refusal([](RecallOptions& o) { o.train = 0; }), HasSubstr("train is 0"));
  EXPECT_THAT(refusal([](RecallOptions& o) { o.validation = -1; }), HasSubstr("validation is -1"));
  EXPECT_THAT(refusal([](RecallOptions& o) { o.out = ""; }), HasSubstr("out is empty"));

  write_recall(options("task"));
  const Dataset dataset = open_dataset(path("task"));
  EXPECT_THAT(error_of([&] { Loader(dataset.train, {.length = 32}); }), HasSubstr("mode is packed; expected labelled"));
  EXPECT_THAT(error_of([&] { Loader(dataset.train, {.mode = LoaderMode::labelled, .length = 64}); }),
              HasSubstr("length is 64; expected 32"));
  EXPECT_THAT(error_of([&] {
                Loader(counting_file({32, 32}), {.mode = LoaderMode::labelled, .length = 32});
              }),
              HasSubstr("mode is labelled; expected another"));
  // A label past the sequence's end.
  std::string labels = read_file(path("task/train-labels.bin"));
  labels[0] = 99;
  write_file(path("task/train-labels.bin"), labels);
  Batch batch;
  EXPECT_THAT(error_of([&] {
                Loader(open_dataset(path("task")).train, {.mode = LoaderMode::labelled, .length = 32, .shuffle = false})
                    .next(batch);
              }),
              HasSubstr("train-labels.bin is damaged: a label at place 99"));
  write_file(path("task/data.json"), R"({"task": {}, "train": {"tokens": 12800, "documents": 400}})");
  EXPECT_THAT(error_of([&] { open_dataset(path("task")); }), HasSubstr("data.json is damaged"));
}

}  // namespace
}  // namespace flashgla::data
