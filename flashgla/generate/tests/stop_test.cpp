// Stop strings.
#include "flashgla/generate/stop.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "flashgla/base/error.h"

namespace flashgla::generate {
namespace {

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
