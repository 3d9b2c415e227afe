// Generation with a small random byte-level model: sessions, batches, states in files, streams.
#include "flashgla/generate/generator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "flashgla/base/file.h"
#include "flashgla/text/utf8.h"
#include "testing/temporary_folder.h"

namespace flashgla::generate {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class GeneratorTest : public ::testing::Test {
 protected:
  GeneratorTest()
      : model_(config(), DType::f32, Device::cpu(), false),
        tokenizer_(text::make_byte_tokenizer()),
        generator_(context_, model_, *tokenizer_) {
    model_.parameters().initialize(3);
  }

  static model::ModelConfig config() {
    model::ModelConfig result;
    result.hidden_size = 32;
    result.num_hidden_layers = 2;
    result.set("num_heads", "2");
    result.intermediate_size = 64;
    result.set("use_short_conv", "true");
    result.initializer_range = 0.3;  // far from uniform
    result.vocab_size = 258;
    result.bos_token_id = 256;
    result.eos_token_id = 257;
    return result;
  }

  static GenerateOptions options(std::int64_t tokens, double temperature = 1.0) {
    GenerateOptions result;
    result.max_tokens = tokens;
    result.sampling.temperature = temperature;
    result.sampling.seed = 42;
    result.stop_at_end = false;
    return result;
  }

  std::string run(Session& session, const GenerateOptions& how) const {
    std::string text;
    generator_.generate(session, how, [&](std::size_t, std::string_view piece) { text += piece; });
    return text;
  }

  Session begun(const std::string& prompt) const {
    Session session(model_, 1);
    generator_.feed(session, {generator_.encode(prompt, true)});
    return session;
  }

  Context context_{Device::cpu(), 1};
  model::LanguageModel model_;
  std::unique_ptr<text::Tokenizer> tokenizer_;
  Generator generator_;
  flashgla::testing::TemporaryFolder folder_;
  std::string file_ = folder_ / "session";
};

TEST_F(GeneratorTest, EqualSeedsWriteEqualTexts) {
  Session a = begun("Once");
  Session b = begun("Once");
  Session c = begun("Once");
  GenerateOptions other = options(60);
  other.sampling.seed = 43;
  const std::string text = run(a, options(60));
  EXPECT_EQ(text, run(b, options(60)));
  EXPECT_NE(text, run(c, other));
}

TEST_F(GeneratorTest, InTwoCallsAsInOne) {
  Session whole = begun("Once");
  Session parts = begun("Once");
  std::string text = run(whole, options(40));
  // A call ends what it shows with whole characters, so compare what the model saw.
  run(parts, options(15));
  run(parts, options(25));
  EXPECT_EQ(whole.state.history, parts.state.history);
  EXPECT_EQ(std::memcmp(whole.logits->data, parts.logits->data, whole.logits->bytes()), 0);
}

TEST_F(GeneratorTest, SavedStateGoesOnAsIfItHadNeverStopped) {
  Session whole = begun("A long prompt is paid once.");
  Session first = begun("A long prompt is paid once.");
  first.save(model_, file_);
  Session second(model_, 1);
  EXPECT_TRUE(second.fresh());
  second.load(model_, file_);
  EXPECT_FALSE(second.fresh());
  GenerateOptions how = options(50);
  how.sampling.repetition_penalty = 1.3;  // what was seen is part of the state
  EXPECT_EQ(run(whole, how), run(second, how));
  EXPECT_EQ(whole.state.history, second.state.history);
}

// A state that grows has room for its prompt alone, or its sequence ends there.
TEST_F(GeneratorTest, APromptThatIsOnlySavedNeedsNoRoomBehindIt) {
  for (const char* mixer : {"transformer", "hyena", "gla"}) {
    model::ModelConfig config(mixer);
    config.hidden_size = 32;
    config.num_hidden_layers = 1;
    config.vocab_size = 258;
    if (mixer == std::string("hyena")) config.set("l_max", "6");
    if (mixer != std::string("hyena")) config.set("num_heads", "2");
    model::LanguageModel model(config, DType::f32, Device::cpu(), false);
    model.parameters().initialize(3);
    const Generator generator(context_, model, *tokenizer_);
    Session first(model, 1), second(model, 1);
    generator.feed(first, {generator.encode("Saved", true)});  // 6 tokens with bos
    const std::vector<Generation> results = generator.generate(first, options(0), {});
    EXPECT_EQ(results.front().tokens, 0) << mixer;
    first.save(model, file_);
    second.load(model, file_);
    EXPECT_EQ(first.state.history, second.state.history) << mixer;
    EXPECT_EQ(std::memcmp(first.logits->data, second.logits->data, first.logits->bytes()), 0) << mixer;
  }
}

TEST_F(GeneratorTest, ReadingAPromptCanBeStoppedBetweenPieces) {
  const text::TokenIds prompt(5000, 'a');
  Session whole(model_, 1), part(model_, 1);
  EXPECT_EQ(generator_.feed(whole, {prompt}, [] { return false; }), 5000);
  int asked = 0;
  const std::int64_t taken = generator_.feed(part, {prompt}, [&] { return ++asked == 2; });
  EXPECT_EQ(asked, 2);
  EXPECT_EQ(taken, part.longest());
  EXPECT_GT(taken, 2500);
  EXPECT_LT(taken, 5000);
  // What was taken in is part of the session: the rest can follow.
  EXPECT_EQ(generator_.feed(part, {text::TokenIds(prompt.begin() + taken, prompt.end())}), 5000 - taken);
  EXPECT_EQ(part.state.history, whole.state.history);
}

TEST_F(GeneratorTest, APromptThatSpellsItsBeginningHasItOnce) {
  write_file(folder_ / "tokenizer.json", R"({
    "added_tokens": [{"id": 2, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
                      "normalized": false, "special": true}],
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
    "post_processor": {"type": "TemplateProcessing",
                       "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                       "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [2], "tokens": ["<s>"]}}},
    "decoder": {"type": "ByteLevel"},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}})");
  write_file(folder_ / "tokenizer_config.json", R"({"bos_token": "<s>"})");
  const auto tokenizer = text::load_tokenizer(folder_.path());
  const Generator generator(context_, model_, *tokenizer);
  EXPECT_EQ(generator.encode("ab", true), (text::TokenIds{2, 0, 1}));
  EXPECT_EQ(generator.encode("<s>ab", true), (text::TokenIds{2, 0, 1}));
  EXPECT_EQ(generator.encode("<s>ab", false), (text::TokenIds{2, 0, 1}));
  EXPECT_EQ(generator.encode("", true), (text::TokenIds{2}));
}

TEST_F(GeneratorTest, StateOfAnotherModelIsRefused) {
  begun("x").save(model_, file_);
  model::LanguageModel other(config(), DType::f32, Device::cpu(), false);
  other.parameters().initialize(4);
  Session session(other, 1);
  EXPECT_THAT([&] { session.load(other, file_); }, ThrowsMessage<Error>(HasSubstr("another model")));
  Session two(model_, 2);
  EXPECT_THROW(two.load(model_, file_), Error);
  std::ofstream(file_) << "nonsense";
  Session fresh(model_, 1);
  EXPECT_THAT([&] { fresh.load(model_, file_); }, ThrowsMessage<Error>(HasSubstr(file_)));
}

TEST_F(GeneratorTest, PromptsOfABatchAreAsAlone) {
  const std::vector<std::string> prompts = {"a", "The second prompt is longer", "three"};
  std::vector<text::TokenIds> tokens;
  tokens.reserve(prompts.size());
  for (const std::string& prompt : prompts) tokens.push_back(generator_.encode(prompt, true));
  Session batch(model_, 3);
  generator_.feed(batch, tokens);
  std::vector<std::string> texts(3);
  const auto results =
      generator_.generate(batch, options(20, 0.0), [&](std::size_t i, std::string_view piece) { texts[i] += piece; });
  for (std::size_t i = 0; i < 3; ++i) {
    Session alone = begun(prompts[i]);
    EXPECT_EQ(texts[i], run(alone, options(20, 0.0))) << prompts[i];
    EXPECT_EQ(results[i].tokens, 20);
    EXPECT_EQ(results[i].finish, Finish::length);
  }
}

TEST_F(GeneratorTest, LongPromptsAreFedInPieces) {
  std::string prompt;
  for (int i = 0; i < 5000; ++i) prompt += static_cast<char>('a' + i * i % 26);
  Session pieces = begun(prompt);
  Session steps(model_, 1);
  for (const std::int32_t token : generator_.encode(prompt, true)) generator_.feed(steps, {{token}});
  EXPECT_EQ(pieces.state.history, steps.state.history);
  double error = 0.0;
  double norm = 0.0;
  for (std::int64_t i = 0; i < pieces.logits->numel(); ++i) {
    const double a = pieces.logits.as<float>()[i];
    const double b = steps.logits.as<float>()[i];
    error += (a - b) * (a - b);
    norm += b * b;
  }
  EXPECT_LT(std::sqrt(error / norm), 1e-4);
}

bool valid_utf8(std::string_view text) {
  while (!text.empty()) {
    const text::Utf8Character character = text::first_character(text);
    if (character.status != text::Utf8::valid) return false;
    text.remove_prefix(character.length);
  }
  return true;
}

TEST_F(GeneratorTest, StreamIsWholeCharacters) {
  Session session = begun("\xC3");  // a prompt may end within a character
  GenerateOptions how = options(600, 3.0);
  int pieces = 0;
  generator_.generate(session, how, [&](std::size_t, std::string_view piece) {
    EXPECT_TRUE(valid_utf8(piece));
    ++pieces;
  });
  EXPECT_GT(pieces, 100);
}

TEST_F(GeneratorTest, StopStringsAreNeverShown) {
  Session session = begun("Once");
  const std::string text = run(session, options(200));
  // A stretch of the text itself that crosses tokens, at its first occurrence.
  const std::string stop = text.substr(text.size() / 2, 6);
  GenerateOptions how = options(200);
  how.stop = {stop, "never comes at all"};
  Session again = begun("Once");
  std::string shown;
  const auto results = generator_.generate(again, how, [&](std::size_t, std::string_view piece) { shown += piece; });
  EXPECT_EQ(results.front().finish, Finish::stop_string);
  EXPECT_EQ(shown, text.substr(0, text.find(stop)));
}

TEST_F(GeneratorTest, EndOfTextEnds) {
  GenerateOptions how = options(5000, 4.0);
  how.stop_at_end = true;
  Session session = begun("");
  const auto results = generator_.generate(session, how, {});
  EXPECT_EQ(results.front().finish, Finish::end_of_text);
  EXPECT_EQ(session.state.history[0].tokens, results.front().tokens + 1);  // bos; the eos is not part of it
}

TEST_F(GeneratorTest, CanBeInterrupted) {
  int asked = 0;
  GenerateOptions how = options(1000);
  how.should_stop = [&] { return ++asked > 7; };
  Session session = begun("Once");
  const auto results = generator_.generate(session, how, {});
  EXPECT_EQ(results.front().finish, Finish::interrupted);
  EXPECT_EQ(results.front().tokens, 7);
}

TEST_F(GeneratorTest, MemoryDoesNotGrowWithTheLength) {
  Session session = begun("Once");
  generator_.generate(session, options(64), {});
  const auto in_use = [] {
    const struct mallinfo2 info = ::mallinfo2();
    return info.uordblks + info.hblkhd;
  };
  const std::size_t before = in_use();
  generator_.generate(session, options(2000), {});
  EXPECT_LE(in_use(), before + 4096);
}

TEST_F(GeneratorTest, RefusesWhatItCannotFeed) {
  Session session(model_, 2);
  EXPECT_THAT([&] { generator_.feed(session, {{1}}); },
              ThrowsMessage<Error>(HasSubstr("are of 1 sequences; expected 2")));
  EXPECT_THAT([&] { generator_.feed(session, {{1}, {}}); }, ThrowsMessage<Error>(HasSubstr("prompt 2 has no token")));
  EXPECT_THAT(
      [&] {
        generator_.feed(session, {{1}, {258}});
      },
      ThrowsMessage<Error>(HasSubstr("token is 258; expected 0 to 257")));
  model::ModelConfig small = config();
  small.vocab_size = 100;
  small.bos_token_id = small.eos_token_id = 0;
  model::LanguageModel other(small, DType::f32, Device::cpu(), false);
  EXPECT_THAT([&] { Generator(context_, other, *tokenizer_); },
              ThrowsMessage<Error>(HasSubstr("do not belong together")));
}

}  // namespace
}  // namespace flashgla::generate
