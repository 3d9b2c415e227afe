#include "flashgla/data/loader.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "flashgla/data/tests/test_folder.h"
#include "testing/random.h"

namespace flashgla::data {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Everything a batch says, kept beyond the next call.
struct Copy {
  std::vector<std::int32_t> tokens, targets, cu_seqlens;
  std::vector<std::uint8_t> continues;
  std::int64_t target_count = 0;
  bool operator==(const Copy&) const = default;
};

std::vector<std::int32_t> values(const TensorView& view) {
  if (!view) return {};
  const auto* data = view.as<std::int32_t>();
  return std::vector<std::int32_t>(data, data + view.numel());
}

Copy copy_of(const Batch& batch) {
  return {values(batch.tokens), values(batch.targets), values(batch.cu_seqlens), batch.continues, batch.target_count};
}

std::vector<Copy> take(Loader& loader, int batches) {
  std::vector<Copy> copies;
  Batch batch;
  while (static_cast<int>(copies.size()) < batches && loader.next(batch)) copies.push_back(copy_of(batch));
  return copies;
}

class Loaders : public FolderTest {
 protected:
  static std::vector<std::int64_t> random_lengths(int count, int longest, std::uint64_t seed) {
    flashgla::testing::Draws random(seed);
    std::vector<std::int64_t> lengths(static_cast<std::size_t>(count));
    for (std::int64_t& length : lengths) length = 1 + static_cast<std::int64_t>(random() % longest);
    return lengths;
  }
  // How often each token of the counting file was a target. Checks on the way that every target follows its token.
  static std::map<std::int32_t, int> count_targets(const std::vector<Copy>& batches) {
    std::map<std::int32_t, int> seen;
    for (const Copy& batch : batches) {
      std::int64_t targets = 0;
      for (std::size_t i = 0; i < batch.tokens.size(); ++i) {
        if (batch.targets[i] < 0) continue;
        EXPECT_EQ(batch.targets[i], batch.tokens[i] + 1);
        ++seen[batch.targets[i]];
        ++targets;
      }
      EXPECT_EQ(targets, batch.target_count);
    }
    return seen;
  }
};

TEST_F(Loaders, PackedStateAndTargetsNeverCrossDocuments) {
  const TokenSpan span = counting_file(random_lengths(60, 40, 5));
  const std::vector<std::int64_t> begins = span.document_begins();
  const auto document_of = [&](std::int32_t token) {
    return std::upper_bound(begins.begin(), begins.end(), token) - begins.begin();
  };
  for (const bool single_pass : {false, true}) {
    Loader loader(span, {.batch = 3, .length = 16, .seed = 9, .single_pass = single_pass});
    for (const Copy& batch : take(loader, 100)) {
      ASSERT_EQ(batch.tokens.size(), 48u);
      ASSERT_EQ(batch.cu_seqlens.front(), 0);
      ASSERT_EQ(batch.cu_seqlens.back(), 48);
      ASSERT_LE(static_cast<std::int64_t>(batch.cu_seqlens.size()) - 1, loader.max_sequences());
      for (std::size_t s = 0; s + 1 < batch.cu_seqlens.size(); ++s) {
        const int begin = batch.cu_seqlens[s], end = batch.cu_seqlens[s + 1];
        ASSERT_LT(begin, end);
        ASSERT_LE(end - begin, 16);
        if (batch.targets[begin] < 0) continue;  // padding
        for (int i = begin; i < end; ++i) {
          ASSERT_EQ(batch.tokens[i], batch.tokens[begin] + (i - begin));
          ASSERT_EQ(document_of(batch.tokens[i]), document_of(batch.targets[i]));
        }
      }
    }
  }
}

TEST_F(Loaders, PackedEpochsHoldEveryTargetOnce) {
  const std::vector<std::int64_t> lengths = random_lengths(200, 90, 6);
  const TokenSpan span = counting_file(lengths);
  Loader loader(span, {.batch = 2, .length = 32, .shuffle = true, .seed = 1, .single_pass = true});
  const std::vector<Copy> batches = take(loader, 100000);
  const auto seen = count_targets(batches);
  EXPECT_EQ(static_cast<std::int64_t>(seen.size()), span.size() - 200);
  EXPECT_EQ(loader.tokens_per_epoch(), span.size() - 200);
  for (const auto& [token, times] : seen) ASSERT_EQ(times, 1) << token;
  Batch batch;
  EXPECT_FALSE(loader.next(batch));
  EXPECT_EQ(batch.target_count, 0) << "the batch is untouched at the end";
  loader.rewind();
  EXPECT_EQ(take(loader, 100000), batches);

  // Endless: every epoch has all documents, in another order.
  Loader endless(span, {.batch = 1, .length = 4096, .seed = 1});
  std::vector<std::int32_t> targets;
  while (static_cast<std::int64_t>(targets.size()) < 3 * endless.tokens_per_epoch()) {
    for (const Copy& copy : take(endless, 1)) targets.insert(targets.end(), copy.targets.begin(), copy.targets.end());
  }
  EXPECT_EQ(endless.epoch(), 3);
  const auto epoch = [&](int i) {
    const auto begin = targets.begin() + i * endless.tokens_per_epoch();
    return std::vector<std::int32_t>(begin, begin + endless.tokens_per_epoch());
  };
  const auto sorted = [](std::vector<std::int32_t> list) {
    std::sort(list.begin(), list.end());
    return list;
  };
  EXPECT_EQ(sorted(epoch(0)), sorted(epoch(1)));
  EXPECT_NE(epoch(0), epoch(1));
  EXPECT_NE(epoch(1), epoch(2));
}

TEST_F(Loaders, TheBoundOnSequencesHoldsForTheShortestDocuments) {
  std::vector<std::int64_t> lengths(50, 2);  // one input each
  lengths.insert(lengths.end(), {1, 1, 1, 700, 33});
  const TokenSpan span = counting_file(lengths);
  for (const std::int64_t batch : {1, 2, 4, 64}) {
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      for (const bool single_pass : {false, true}) {
        Loader loader(span, {.batch = batch, .length = 8, .seed = seed, .single_pass = single_pass});
        for (const Copy& copy : take(loader, 40)) {
          ASSERT_LE(static_cast<std::int64_t>(copy.cu_seqlens.size()) - 1, loader.max_sequences());
        }
      }
    }
  }
}

TEST_F(Loaders, WindowsOfAnEpochDoNotOverlapAndMove) {
  const TokenSpan span = counting_file({1000});
  Loader loader(span, {.mode = LoaderMode::windows, .batch = 2, .length = 10, .seed = 4});
  EXPECT_EQ(loader.tokens_per_epoch(), 980);
  std::set<std::int32_t> offsets;
  std::vector<std::vector<Copy>> epochs;
  for (int epoch = 0; epoch < 20; ++epoch) {
    EXPECT_EQ(loader.epoch(), epoch);
    epochs.push_back(take(loader, 49));
    const auto seen = count_targets(epochs.back());
    EXPECT_EQ(seen.size(), 980u);
    offsets.insert(seen.begin()->first % 10);
  }
  EXPECT_GT(offsets.size(), 5u) << "epochs must begin at different offsets";
  EXPECT_NE(epochs[0], epochs[1]);
}

TEST_F(Loaders, WindowsInASinglePassCoverEveryTarget) {
  for (const std::int64_t tokens : {2, 10, 11, 12, 100, 995}) {
    const TokenSpan span = counting_file({tokens}, "tokens" + std::to_string(tokens));
    for (const bool shuffle : {false, true}) {
      Loader loader(span,
                    {.mode = LoaderMode::windows, .batch = 4, .length = 10, .shuffle = shuffle, .single_pass = true});
      const auto seen = count_targets(take(loader, 1000));
      EXPECT_EQ(static_cast<std::int64_t>(seen.size()), tokens - 1);
      for (const auto& [token, times] : seen) ASSERT_EQ(times, 1) << token;
    }
  }
}

TEST_F(Loaders, SegmentsGoOnWhereTheyEnded) {
  const TokenSpan span = counting_file({600, 700});
  for (const std::int64_t segments : {0, 1, 3}) {
    Loader loader(span, {.mode = LoaderMode::segments, .batch = 4, .length = 16, .segments = segments, .seed = 2});
    const std::int64_t stretch = loader.config().segments;
    EXPECT_EQ(stretch, segments == 0 ? 1299 / 64 : segments);
    std::vector<std::int32_t> last(4, -1);
    int step = 0;
    std::set<std::int32_t> starts;
    for (const Copy& batch : take(loader, 60)) {
      for (int row = 0; row < 4; ++row) {
        ASSERT_EQ(batch.continues[row], step % stretch != 0);
        if (batch.continues[row]) {
          ASSERT_EQ(batch.tokens[row * 16], last[row]);
        } else {
          starts.insert(batch.tokens[row * 16]);
        }
        last[row] = batch.targets[row * 16 + 15];
        for (int i = 0; i < 16; ++i) ASSERT_EQ(batch.targets[row * 16 + i], batch.tokens[row * 16] + i + 1);
      }
      ++step;
    }
    EXPECT_GT(starts.size(), 5u);
  }
}

TEST_F(Loaders, SegmentsInASinglePassCoverEveryTargetOnce) {
  for (const std::int64_t tokens : {2, 50, 64, 65, 66, 1000}) {
    const TokenSpan span = counting_file({tokens}, "tokens" + std::to_string(tokens));
    for (const std::int64_t segments : {0, 2}) {
      Loader loader(
          span, {.mode = LoaderMode::segments, .batch = 4, .length = 16, .segments = segments, .single_pass = true});
      const auto seen = count_targets(take(loader, 1000));
      EXPECT_EQ(static_cast<std::int64_t>(seen.size()), tokens - 1) << tokens;
      for (const auto& [token, times] : seen) ASSERT_EQ(times, 1) << token;
    }
  }
}

TEST_F(Loaders, ResumeGoesOnWithTheExactSample) {
  const TokenSpan span = counting_file(random_lengths(50, 60, 8));
  for (const LoaderMode mode : {LoaderMode::packed, LoaderMode::windows, LoaderMode::segments}) {
    for (const bool single_pass : {false, true}) {
      const LoaderConfig config = {
          .mode = mode, .batch = 3, .length = 20, .segments = 3, .seed = 77, .single_pass = single_pass};
      Loader whole_run(span, config);
      const std::vector<Copy> expected = take(whole_run, 90);
      for (int stop = 0; stop <= static_cast<int>(expected.size()); stop += 7) {
        Loader before(span, config);
        take(before, stop);
        const std::string state = before.save_state();
        EXPECT_EQ(std::count(state.begin(), state.end(), '\n'), 0);
        Loader after(span, config);
        take(after, 5);  // whatever it did before
        after.restore(state);
        ASSERT_EQ(take(after, 90 - stop), std::vector<Copy>(expected.begin() + stop, expected.end()))
            << name_of(mode) << " " << stop;
      }
    }
  }
}

TEST_F(Loaders, SeedsGiveOrdersAndOrderOfTheFileIsThere) {
  const TokenSpan span = counting_file(random_lengths(50, 60, 8));
  for (const LoaderMode mode : {LoaderMode::packed, LoaderMode::windows, LoaderMode::segments}) {
    LoaderConfig config = {.mode = mode, .batch = 2, .length = 8, .segments = 2, .seed = 1};
    Loader a(span, config), b(span, config);
    config.seed = 2;
    Loader c(span, config);
    const auto from_a = take(a, 20);
    EXPECT_EQ(from_a, take(b, 20));
    EXPECT_NE(from_a, take(c, 20));
    config.shuffle = false;
    Loader ordered(span, config);
    const auto batch = take(ordered, 1)[0];
    EXPECT_EQ(batch.tokens[0], 0);
  }
}

TEST_F(Loaders, StatesOfOtherRunsAreRefusedByName) {
  const TokenSpan span = counting_file({500, 500});
  const TokenSpan other = counting_file({400, 600}, "other");
  const LoaderConfig config = {.batch = 2, .length = 8, .seed = 5};
  Loader loader(span, config);
  take(loader, 3);
  const std::string state = loader.save_state();
  const auto refusal = [&](const TokenSpan& data, const LoaderConfig& changed, const std::string& text) {
    Loader mine(data, changed);
    return error_of([&] { mine.restore(text); });
  };
  LoaderConfig changed = config;
  changed.seed = 6;
  EXPECT_THAT(refusal(span, changed, state), HasSubstr("another seed: 5; now 6"));
  auto old = nlohmann::json::parse(state);
  old.erase("version");
  EXPECT_THAT(refusal(span, config, old.dump()), HasSubstr("of version 1, whose data come in another order"));
  changed = config;
  changed.length = 4;
  EXPECT_THAT(refusal(span, changed, state), HasSubstr("length"));
  changed = config;
  changed.mode = LoaderMode::windows;
  EXPECT_THAT(refusal(span, changed, state), HasSubstr("mode"));
  EXPECT_THAT(refusal(split(span, 0.5).first, config, state), HasSubstr("another data"));
  EXPECT_THAT(refusal(other, config, state), HasSubstr("another data")) << "only the documents' lengths differ";
  for (const std::string& text : {std::string(), std::string("{}"), std::string("[1]"), state.substr(0, 40)}) {
    EXPECT_THAT(refusal(span, config, text), HasSubstr("damaged")) << text;
  }
  for (const char* key : {"cursor", "position"}) {
    for (const nlohmann::json& value : {nlohmann::json(-1), nlohmann::json("x"), nlohmann::json(1.5)}) {
      auto json = nlohmann::json::parse(state);
      json[key] = value;
      EXPECT_THAT(refusal(span, config, json.dump()), HasSubstr(key));
    }
  }
  auto json = nlohmann::json::parse(state);
  json["position"] = 100000;
  EXPECT_THAT(refusal(span, config, json.dump()), HasSubstr("position"));
}

TEST_F(Loaders, TokensOutsideTheVocabularyNameTheirFile) {
  const TokenSpan span = counting_file({500, 500});
  for (const LoaderMode mode : {LoaderMode::packed, LoaderMode::windows, LoaderMode::segments}) {
    const auto last = [&](std::int64_t vocabulary) {
      Loader loader(
          span, {.mode = mode, .batch = 2, .length = 8, .segments = 2, .single_pass = true, .vocabulary = vocabulary});
      return error_of([&] {
        Batch batch;
        while (loader.next(batch)) {
        }
      });
    };
    EXPECT_EQ(last(0), "no error");
    EXPECT_EQ(last(1000), "no error");
    EXPECT_THAT(last(900), AllOf(HasSubstr(span.file->path()), HasSubstr("expected tokens below 900")));
  }
}

TEST_F(Loaders, TooShortDataSaysWhatIsNeeded) {
  const TokenSpan span = counting_file({50});
  const auto refusal = [&](const LoaderConfig& config) { return error_of([&] { Loader(span, config); }); };
  EXPECT_THAT(refusal({.mode = LoaderMode::windows, .batch = 1, .length = 50}), HasSubstr("51 are needed"));
  EXPECT_EQ(refusal({.mode = LoaderMode::windows, .batch = 8, .length = 49}), "no error");
  EXPECT_THAT(refusal({.mode = LoaderMode::segments, .batch = 4, .length = 16, .segments = 0}),
              HasSubstr("65 are needed"));
  EXPECT_THAT(refusal({.batch = 0}), HasSubstr("batch"));
  EXPECT_THAT(refusal({.length = -3}), HasSubstr("length is -3"));
  EXPECT_THAT(refusal({.batch = 1 << 20, .length = 1 << 20}), HasSubstr("smaller"));
  const TokenSpan ones = counting_file({1, 1, 1}, "ones");
  EXPECT_THAT(error_of([&] { Loader(ones, {}); }), HasSubstr("two tokens"));
  EXPECT_THAT(error_of([] { loader_mode_from_name("random"); }), HasSubstr("windows"));
}

}  // namespace
}  // namespace flashgla::data
