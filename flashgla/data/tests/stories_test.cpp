#include "flashgla/data/stories.h"

#include <gmock/gmock.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "flashgla/base/file.h"
#include "flashgla/data/dataset.h"
#include "flashgla/data/prepare.h"
#include "flashgla/data/tests/test_folder.h"

namespace flashgla::data {
namespace {

using ::testing::HasSubstr;

class Grammars : public FolderTest {};
class Stories : public FolderTest {};

TEST_F(Grammars, ExpectationsAgreeWithThoseWorkedOutByHand) {
  Grammar grammar;
  grammar.add_set("s", "one|two", {"p|P", "qq|QQQQ"});
  grammar.add_rule("start", {{3, "a[x=s]<t>"}, {1, "b"}});
  grammar.add_rule("t", {{1, "c"}, {1, "d[x.two]"}});
  grammar.finish("start");
  EXPECT_NEAR(grammar.expected_bits(), 0.75 * std::log2(4.0 / 3.0) + 0.25 * 2.0 + 0.75 * 2.0, 1e-12);
  EXPECT_NEAR(grammar.expected_bytes(), 0.75 * (1 + 1.5 + 0.5 * 1 + 0.5 * (1 + 2.5)) + 0.25, 1e-12);

  Grammar recursive;
  recursive.add_rule("r", {{3, "x<r>"}, {1, "y{z|ww}"}});
  recursive.finish("r");
  // Four rounds on average, each of h(1/4) bits; the last adds a bit and a byte and a half.
  EXPECT_NEAR(recursive.expected_bytes(), 4.0 + 1.5, 1e-9);
  EXPECT_NEAR(recursive.expected_bits(), 4.0 * (0.25 * 2.0 + 0.75 * std::log2(4.0 / 3.0)) + 1.0, 1e-9);
}

// All texts of a small grammar, each with its probability: they sum to one, and the definition of entropy gives what
// the recursion gave. Draws that exclude others are in it.
TEST_F(Grammars, ExpectationsAgreeWithEnumeration) {
  Grammar grammar;
  grammar.add_set("s", "f|g", {"a|", "bb|x", "ccc|xx", "dddd|xxx"});
  grammar.add_rule("start", {{1, "1[u=s][v=s!u]<end>"}, {2, "2[u=s][v=s!u][w=s!u!v].<end>"}});
  grammar.add_rule("end", {{5, "-[u.g]"}, {1, "+{k|ll}[v.g][v=s!v][v.g]"}});
  grammar.finish("start");
  std::map<std::string, double> texts;
  for (std::uint64_t seed = 0; seed < 20000; ++seed) {
    const Grammar::Told told = grammar.tell(seed);
    const auto [place, is_new] = texts.emplace(told.text, told.bits);
    ASSERT_DOUBLE_EQ(place->second, told.bits) << "one text, two probabilities: " << told.text;
  }
  double total = 0.0, bits = 0.0, bytes = 0.0;
  for (const auto& [text, information] : texts) {
    const double p = std::exp2(-information);
    total += p;
    bits += p * information;
    bytes += p * static_cast<double>(text.size());
  }
  EXPECT_NEAR(total, 1.0, 1e-12);
  EXPECT_NEAR(bits, grammar.expected_bits(), 1e-9);
  EXPECT_NEAR(bytes, grammar.expected_bytes(), 1e-9);
}

TEST_F(Grammars, WhatAReaderCouldNotTellApartIsRefused) {
  const auto refusal = [](const std::vector<Grammar::Choice>& alternatives) {
    return error_of([&] {
      Grammar grammar;
      grammar.add_set("s", "f|g", {"a|x", "b|y"});
      grammar.add_rule("start", alternatives);
      grammar.finish("start");
    });
  };
  EXPECT_EQ(refusal({{1, "ab[x=s]"}, {1, "ac"}}), "no error");
  EXPECT_THAT(refusal({{1, "ab"}, {1, "abc"}}), HasSubstr("\"ab\" begins \"abc\""));
  EXPECT_THAT(refusal({{1, "ab"}, {1, "ab"}}), HasSubstr("begins"));
  EXPECT_THAT(refusal({{1, "[x=s]"}, {1, "ab"}}), HasSubstr("does not begin with literal"));
  EXPECT_THAT(refusal({{1, ""}, {1, "ab"}}), HasSubstr("does not begin with literal"));
  EXPECT_THAT(refusal({{1, "{on|once}"}}), HasSubstr("\"on\" begins \"once\""));
  EXPECT_THAT(refusal({{1, "a<b>"}}), HasSubstr("rule b is used but not given"));
  EXPECT_THAT(refusal({{1, "[x]"}}), HasSubstr("nothing binds"));
  EXPECT_THAT(refusal({{1, "[x=s][x.h]"}}), HasSubstr("no form h"));
  EXPECT_THAT(refusal({{1, "[x=t]"}}), HasSubstr("no set t"));
  EXPECT_THAT(refusal({{1, "a{b"}}), HasSubstr("open brace"));
  EXPECT_THAT(refusal({{1, "a]b"}}), HasSubstr("closing bracket"));
  EXPECT_THAT(refusal({{0, "a"}}), HasSubstr("weight 0"));
  EXPECT_THAT(refusal({{1, "a<start>"}}), HasSubstr("does not end"));
  EXPECT_THAT(refusal({{2, "a<start><start>"}, {1, "b"}}), HasSubstr("does not end"));
  Grammar grammar;
  EXPECT_THAT(error_of([&] { grammar.add_set("s", "f", {"Ann", "Anna"}); }), HasSubstr("\"Ann\" begins \"Anna\""));
  EXPECT_THAT(error_of([&] { grammar.add_set("s", "f|g", {"a"}); }), HasSubstr("does not have the forms"));
}

TEST_F(Grammars, MisuseOfSlotsIsFoundWhenTelling) {
  const auto refusal = [](const std::string& start) {
    Grammar grammar;
    grammar.add_set("s", "f", {"a", "b", "c"});
    grammar.add_rule("start", {{1, start}});
    grammar.finish("start");
    return error_of([&] {
      for (std::uint64_t seed = 0; seed < 100; ++seed) grammar.tell(seed);
    });
  };
  EXPECT_EQ(refusal("[x=s][y=s!x]"), "no error");
  EXPECT_THAT(refusal("[x][x=s]"), HasSubstr("before it is drawn"));
  EXPECT_THAT(refusal("[x=s!y][y=s]"), HasSubstr("unbound or equal"));
  EXPECT_THAT(refusal("[x=s][y=s][z=s!x!y]"), HasSubstr("unbound or equal"));
}

TEST_F(Stories, TheTextDeterminesEveryChoice) {
  const Grammar& grammar = story_grammar();
  std::set<std::string> seen;
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    const Grammar::Told told = grammar.tell(seed);
    const Grammar::Read read = grammar.read(told.text);
    ASSERT_TRUE(read.complete) << told.text;
    ASSERT_EQ(read.bytes, told.text.size());
    ASSERT_NEAR(read.bits, told.bits, 1e-9);
    seen.insert(told.text);
  }
  EXPECT_EQ(seen.size(), 2000u);
  EXPECT_EQ(grammar.tell(5).text, grammar.tell(5).text);
}

TEST_F(Stories, OtherTextsAreNotStories) {
  const Grammar& grammar = story_grammar();
  const std::string text = grammar.tell(1).text;
  EXPECT_FALSE(grammar.read("").complete);
  EXPECT_FALSE(grammar.read(text + "x").complete);
  for (std::size_t size = 0; size < text.size(); ++size) ASSERT_FALSE(grammar.read(text.substr(0, size)).complete);
  // A name that is not the one told before ends the recognition there.
  std::string other = text;
  const std::string hero = "Lidric";
  ASSERT_THAT(text, HasSubstr(hero));
  const std::size_t last = other.rfind(hero);
  other.replace(last, hero.size(), "Badric");
  const Grammar::Read read = grammar.read(other);
  EXPECT_FALSE(read.complete);
  EXPECT_LE(read.bytes, last);
  EXPECT_GT(read.bytes + 200, last);
}

TEST_F(Stories, TheCorpusAgreesWithItsEntropy) {
  const StoriesReport report = write_stories({.seed = 3, .megabytes = 2.0, .out = path("a.jsonl")});
  EXPECT_GE(report.text_bytes, 2'000'000);
  EXPECT_LT(report.text_bytes, 2'020'000);
  EXPECT_NEAR(report.realised_bits_per_byte, report.entropy_bits_per_byte, 4 * report.standard_error);
  EXPECT_LT(report.standard_error, 0.01 * report.entropy_bits_per_byte);
  EXPECT_NEAR(static_cast<double>(report.text_bytes) / static_cast<double>(report.documents),
              story_grammar().expected_bytes(), 0.04 * story_grammar().expected_bytes());
  const auto figures = nlohmann::json::parse(read_file(path("a.json")));
  EXPECT_EQ(figures["entropy_bits_per_byte"], report.entropy_bits_per_byte);
  EXPECT_EQ(figures["documents"], report.documents);

  write_stories({.seed = 3, .megabytes = 2.0, .out = path("b.jsonl")});
  EXPECT_TRUE(read_file(path("a.jsonl")) == read_file(path("b.jsonl")));
  write_stories({.seed = 4, .megabytes = 0.01, .out = path("c.jsonl")});
  EXPECT_NE(read_file(path("a.jsonl")).substr(0, 1000), read_file(path("c.jsonl")).substr(0, 1000));

  // The entropy of exactly the texts of each part goes with them.
  prepare({.inputs = {path("a.jsonl")}, .out = path("out")});
  const Dataset dataset = open_dataset(path("out"));
  EXPECT_NEAR(dataset.train_entropy_bits_per_byte, report.entropy_bits_per_byte, 4 * report.standard_error);
  EXPECT_NEAR(dataset.validation_entropy_bits_per_byte, report.entropy_bits_per_byte, 20 * report.standard_error);
  const double train = static_cast<double>(dataset.train.size() - dataset.train.file->documents()) *
                       dataset.train_bytes_per_target * dataset.train_entropy_bits_per_byte;
  const double validation = static_cast<double>(dataset.validation.size() - dataset.validation.file->documents()) *
                            dataset.validation_bytes_per_target * dataset.validation_entropy_bits_per_byte;
  EXPECT_NEAR((train + validation) / static_cast<double>(report.text_bytes), report.realised_bits_per_byte, 1e-9);
}

TEST_F(Stories, OptionsThatCannotBeAreNamed) {
  EXPECT_THAT(error_of([&] { write_stories({.out = path("a.txt")}); }), HasSubstr(".jsonl"));
  EXPECT_THAT(error_of([&] { write_stories({.megabytes = 0.0, .out = path("a.jsonl")}); }), HasSubstr("megabytes"));
  EXPECT_THAT(error_of([&] { write_stories({.out = "/proc/no/such/a.jsonl"}); }), HasSubstr("/proc/no/such"));
}

}  // namespace
}  // namespace flashgla::data
