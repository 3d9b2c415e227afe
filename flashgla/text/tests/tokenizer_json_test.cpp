// What the tokenizers package gives for the same files is compared in python/tests/test_tokenizers.py; here is what can
// be said without it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>

#include "flashgla/base/error.h"
#include "flashgla/base/file.h"
#include "flashgla/text/huggingface/regex.h"
#include "flashgla/text/huggingface/unicode.h"
#include "flashgla/text/tokenizer.h"
#include "flashgla/text/utf8.h"
#include "testing/random.h"

namespace flashgla::text {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

json special(int id, const char* content) {
  return {{"id", id}, {"content", content}, {"special", true}, {"normalized", false}};
}

// GPT-2's way: bytes as characters (Ġ is the space), "the" and " the" merged.
json byte_level() {
  json vocabulary = {{"<|endoftext|>", 0}};
  const auto add = [&](const std::string& token) { vocabulary.emplace(token, vocabulary.size()); };
  for (int byte = '!'; byte <= '~'; ++byte) add(std::string(1, static_cast<char>(byte)));
  for (const char* token : {"\u0120", "\u010A", "\u00C3", "\u00A9", "th", "the", "\u0120the", "\u00C3\u00A9"})
    add(token);
  return {{"version", "1.0"},
          {"added_tokens", {special(0, "<|endoftext|>")}},
          {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
          {"decoder", {{"type", "ByteLevel"}}},
          {"model",
           {{"type", "BPE"},
            {"vocab", vocabulary},
            {"merges", {"t h", "th e", "\u0120 the", json::array({"\u00C3", "\u00A9"})}}}}};
}

// LLaMA-2's way: the space is ▁, other characters are bytes.
json byte_fallback() {
  json vocabulary = {{"<unk>", 0}, {"<s>", 1}, {"</s>", 2}};
  for (int byte = 0; byte < 256; ++byte) {
    char token[8];
    std::snprintf(token, sizeof token, "<0x%02X>", byte);
    vocabulary.emplace(token, 3 + byte);
  }
  for (const char* token : {"\u2581", "t", "h", "e", "th", "the", "\u2581the"}) {
    vocabulary.emplace(token, vocabulary.size());
  }
  return {{"added_tokens", {special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")}},
          {"normalizer",
           {{"type", "Sequence"},
            {"normalizers",
             {{{"type", "Prepend"}, {"prepend", "\u2581"}},
              {{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", "\u2581"}}}}}},
          {"pre_tokenizer", nullptr},
          {"post_processor",
           {{"type", "TemplateProcessing"},
            {"single", {{{"SpecialToken", {{"id", "<s>"}}}}, {{"Sequence", {{"id", "A"}}}}}},
            {"special_tokens", {{"<s>", {{"ids", {1}}}}}}}},
          {"decoder",
           {{"type", "Sequence"},
            {"decoders",
             {{{"type", "Replace"}, {"pattern", {{"String", "\u2581"}}}, {"content", " "}},
              {{"type", "ByteFallback"}},
              {{"type", "Fuse"}},
              {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}}}}}},
          {"model",
           {{"type", "BPE"},
            {"unk_token", "<unk>"},
            {"byte_fallback", true},
            {"fuse_unk", true},
            {"vocab", vocabulary},
            {"merges", {"t h", "th e", "\u2581 the"}}}}};
}

json unigram() {
  json vocabulary = json::array();
  const std::pair<const char*, double> tokens[] = {{"<unk>", 0.0}, {"\u2581", -2.0},   {"a", -3.0}, {"b", -3.5},
                                                   {"ab", -5.0},   {"\u2581ab", -6.0}, {"fi", -4.0}};
  for (const auto& [token, score] : tokens) vocabulary.push_back(json::array({token, score}));
  return {{"normalizer", {{"type", "NFKC"}}},
          {"pre_tokenizer", {{"type", "Metaspace"}, {"replacement", "\u2581"}, {"prepend_scheme", "always"}}},
          {"decoder", {{"type", "Metaspace"}, {"replacement", "\u2581"}, {"prepend_scheme", "always"}}},
          {"model", {{"type", "Unigram"}, {"unk_id", 0}, {"vocab", vocabulary}}}};
}

class TokenizerJson : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(::testing::TempDir()) /
              ("flashgla_json_" + std::string(::testing::UnitTest::GetInstance()->current_test_info()->name()));
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::unique_ptr<Tokenizer> load(const json& definition) {
    write_file(folder_ / "tokenizer.json", definition.dump());
    return load_tokenizer(folder_);
  }
  std::string complaint(const json& definition) {
    try {
      load(definition);
    } catch (const Error& error) {
      return error.what();
    }
    return "none";
  }

  fs::path folder_;
};

TEST_F(TokenizerJson, ByteLevelMergesAndComesBack) {
  const auto tokenizer = load(byte_level());
  EXPECT_EQ(tokenizer->kind(), "huggingface");
  const auto id = [&](const char* token) { return byte_level()["model"]["vocab"][token].get<std::int32_t>(); };
  EXPECT_THAT(tokenizer->encode("the the"), ElementsAre(id("the"), id("\u0120the")));
  EXPECT_THAT(tokenizer->encode("\u00E9"), ElementsAre(id("\u00C3\u00A9")));
  EXPECT_THAT(tokenizer->encode("the<|endoftext|>the"), ElementsAre(id("the"), 0, id("the")));
  EXPECT_EQ(tokenizer->decode(tokenizer->encode("the <|endoftext|>then \u00E9")), "the then \u00E9");
  EXPECT_EQ(tokenizer->eos_id(), 0);  // by its name, since no file says so
  EXPECT_EQ(tokenizer->bos_id(), -1);
  EXPECT_FALSE(tokenizer->adds_bos());
}

TEST_F(TokenizerJson, BytesFillInForCharacters) {
  const auto tokenizer = load(byte_fallback());
  const auto id = [&](const char* token) { return byte_fallback()["model"]["vocab"][token].get<std::int32_t>(); };
  EXPECT_THAT(tokenizer->encode("the the"), ElementsAre(id("\u2581the"), id("\u2581the")));
  EXPECT_THAT(tokenizer->encode("\u00E9"), ElementsAre(id("\u2581"), 3 + 0xC3, 3 + 0xA9));
  EXPECT_TRUE(tokenizer->adds_bos());
  EXPECT_EQ(tokenizer->bos_id(), 1);
  EXPECT_EQ(tokenizer->eos_id(), 2);
  for (const char* text : {"the the", "\u00E9", " the", "the \U0001F600!", ""}) {
    TokenIds ids = tokenizer->encode(text);
    EXPECT_EQ(tokenizer->decode(ids), text);
    ids.insert(ids.begin(), 1);
    StreamDecoder decoder(*tokenizer);
    std::string out;
    for (const std::int32_t each : ids) out += decoder.push(each);
    EXPECT_EQ(out + decoder.finish(), text);
  }
}

TEST_F(TokenizerJson, UnigramTakesTheBestSum) {
  const auto tokenizer = load(unigram());
  EXPECT_THAT(tokenizer->encode("ab ab"), ElementsAre(5, 5));
  EXPECT_THAT(tokenizer->encode("aab"), ElementsAre(1, 2, 4));
  EXPECT_THAT(tokenizer->encode("xyz a"), ElementsAre(1, 0, 1, 2));  // unknown neighbours are one
  EXPECT_THAT(tokenizer->encode("\uFB01"), ElementsAre(1, 6));
  EXPECT_EQ(tokenizer->decode(tokenizer->encode("ab a")), "ab a");
}

TEST_F(TokenizerJson, BrokenBytesBecomeReplacementCharacters) {
  const auto tokenizer = load(byte_fallback());
  const std::string r(kReplacementCharacter);
  EXPECT_EQ(tokenizer->encode("a\xFFz"), tokenizer->encode("a" + r + "z"));
  EXPECT_EQ(tokenizer->encode("\xE2\x82z\xF0\x9F"), tokenizer->encode(r + "z" + r));
}

TEST_F(TokenizerJson, LongRunsAreNotQuadratic) {
  for (const json& definition : {byte_level(), byte_fallback(), unigram()}) {
    const auto tokenizer = load(definition);
    for (const char* unit : {"a", " ", "t", "the", "\n", "\u00E9", "\u4F60", "."}) {
      std::string text;
      while (text.size() < 1'000'000) text += unit;
      const auto start = std::chrono::steady_clock::now();
      tokenizer->encode(text);
      // Fractions of a second; 10^12 comparisons would be a quarter of an hour.
      EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60)) << unit;
    }
  }
}

TEST_F(TokenizerJson, WhatEndsATextIsInTheFilesBeside) {
  json definition = byte_level();
  definition["added_tokens"].push_back(special(105, "<begin>"));
  ASSERT_EQ(definition["model"]["vocab"].size(), 103u);
  EXPECT_THAT(complaint(definition), HasSubstr("105"));
  EXPECT_THAT(complaint(definition), HasSubstr("gives it 103"));
  definition["added_tokens"][1]["id"] = 103;
  const std::string plain = load(definition)->fingerprint();
  write_file(folder_ / "tokenizer_config.json",
             R"({"bos_token": {"content": "<begin>"}, "eos_token": "<|endoftext|>", "add_bos_token": true})");
  const auto tokenizer = load(definition);
  EXPECT_EQ(tokenizer->bos_id(), 103);
  EXPECT_EQ(tokenizer->vocab_size(), 104);
  EXPECT_TRUE(tokenizer->adds_bos());
  EXPECT_NE(tokenizer->fingerprint(), plain);

  const fs::path copy = folder_ / "copy";
  fs::create_directories(copy);
  tokenizer->save(copy);
  const auto again = load_tokenizer(copy);
  EXPECT_EQ(again->fingerprint(), tokenizer->fingerprint());
  EXPECT_EQ(again->bos_id(), 103);
  EXPECT_EQ(load_tokenizer(copy / "tokenizer.json")->fingerprint(), tokenizer->fingerprint());
  EXPECT_TRUE(has_tokenizer(copy));

  write_file(folder_ / "tokenizer_config.json", R"({"bos_token": "<other>"})");
  EXPECT_THAT(complaint(definition), HasSubstr("bos_token is \"<other>\""));
}

TEST_F(TokenizerJson, WhatIsLackedIsRefusedByName) {
  const auto with = [](const char* pointer, const json& value) {
    json definition = byte_level();
    definition[json::json_pointer(pointer)] = value;
    return definition;
  };
  const std::vector<std::tuple<const char*, json, const char*>> cases = {
      {"/model/type", "WordPiece", "model: the model WordPiece"},
      {"/model/dropout", 0.1, "dropout"},
      {"/model/merges/0", "t q", "which is no token"},
      {"/model/merges/0", "t", "merge 0 is not two tokens"},
      {"/model/unk_token", "<unk>", "unk_token <unk>"},
      {"/model/vocab/th", -4, "\"th\""},
      {"/normalizer", {{"type", "BertNormalizer"}}, "normalizer: the normalizer BertNormalizer"},
      {"/normalizer", {{"type", "Precompiled"}, {"precompiled_charsmap", "abc"}}, "precompiled_charsmap"},
      {"/pre_tokenizer/type", "UnicodeScripts", "the pre-tokenizer UnicodeScripts"},
      {"/pre_tokenizer",
       {{"type", "Sequence"}, {"pretokenizers", {{{"type", "FixedLength"}}}}},
       "pretokenizers[0]: the pre-tokenizer FixedLength"},
      {"/decoder/type", "CTC", "the decoder CTC"},
      {"/post_processor", {{"type", "Other"}}, "the post-processor Other"},
      {"/version", "2.0", "version 2.0"},
      {"/model", nullptr, "tokenizer.json"},
  };
  for (const auto& [pointer, value, words] : cases) {
    const std::string message = complaint(with(pointer, value));
    EXPECT_THAT(message, HasSubstr(words)) << pointer;
    EXPECT_THAT(message, HasSubstr("tokenizer.json")) << pointer;
  }
  for (const auto& [pattern, words] : {std::pair("(", "is wrong"), {"[a&&b]", "intersection"}, {"\\b", "\\b"}}) {
    const json split = {{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}};
    EXPECT_THAT(complaint(with("/pre_tokenizer", split)), HasSubstr(words));
  }
}

TEST_F(TokenizerJson, DamagedFilesNeverCrash) {
  flashgla::testing::Draws random(2);
  int refused = 0, trials = 0;
  for (const json& definition : {byte_level(), byte_fallback(), unigram()}) {
    const std::string whole = definition.dump();
    for (int trial = 0; trial < 400; ++trial, ++trials) {
      std::string damaged = whole;
      for (std::uint64_t i = 0; i <= random() % 3; ++i) {
        const std::size_t at = random() % damaged.size();
        if (random() % 2 == 0) {
          damaged[at] = static_cast<char>(random());
        } else {
          damaged.erase(at, random() % 12);
        }
      }
      write_file(folder_ / "tokenizer.json", damaged);
      try {
        const auto tokenizer = load_tokenizer(folder_);
        tokenizer->decode(tokenizer->encode("the \xFF \u00E9 <s> ab\n"));
      } catch (const Error&) {
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, trials / 4);
}

TEST_F(TokenizerJson, ThreadsShareOne) {
  const auto tokenizer = load(byte_fallback());
  std::string text;
  for (int i = 0; i < 2000; ++i) text += i % 7 == 0 ? "the " : std::to_string(i) + " \u00E9 ";
  const TokenIds expected = tokenizer->encode(text);
  std::atomic<int> equal{0};
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int i = 0; i < 4; ++i) threads.emplace_back([&] { equal += tokenizer->encode(text) == expected; });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(equal, 4);
}

TEST(Unicode, SyllablesTakeTrailingConsonantsAlone) {
  using huggingface::Form;
  using huggingface::normalized;
  EXPECT_EQ(normalized("x\uC950\u11A8", Form::nfc), "x\uC951");
  for (const char* text : {"\uC950\u11A7", "\uC950\u11A7\u11A8\uC950\u11A7x", "\u11A7", "a\u11A7\u11A7 \u11A7"}) {
    EXPECT_EQ(normalized(text, Form::nfc), text);
    EXPECT_EQ(normalized(text, Form::nfkc), text);
    EXPECT_EQ(normalized(normalized(text, Form::nfd), Form::nfc), text);
  }
}

TEST(Regex, SaysWhatOnigurumaMeans) {
  using huggingface::translate_pattern;
  EXPECT_EQ(translate_pattern("\\s+(?!\\S)", ""), "\\p{White_Space}+(?!\\P{White_Space})");
  EXPECT_EQ(translate_pattern("[^(\\s|[.,])]", ""), "[^(\\p{White_Space}|.,)]");
  EXPECT_EQ(translate_pattern("(?i:'s)\\p{Letter}{,3}\\p{Han}", ""), "(?i:'s)\\p{L}{0,3}\\p{sc:Han}");
  EXPECT_EQ(translate_pattern("(?m:.)\\u4E00{", ""), "(?s:.)\\x{4E00}\\{");
  EXPECT_EQ(translate_pattern("\\s+$", ""), "(?<!\\p{White_Space})\\p{White_Space}+$");
  EXPECT_EQ(translate_pattern("[\\]a]+$", ""), "(?<![\\]a])[\\]a]+$");
  EXPECT_EQ(translate_pattern("[ab][c]+$", ""), "[ab][c]+$");
}

// Whitespace before an end of line, or of the text; a run that ends elsewhere is passed in linear time: this text takes
// minutes where every character of it is tried.
TEST(Regex, WhitespaceAtTheEndTakesLinearTime) {
  const huggingface::Regex regex("\\s+$", "");
  huggingface::MatchMemory memory;
  const auto matches = [&](std::string_view text) {
    std::vector<huggingface::Span> spans;
    regex.cut(text, memory, spans);
    std::vector<std::string> found;
    for (const auto& span : spans) {
      if (span.match) found.emplace_back(text.substr(span.begin, span.end - span.begin));
    }
    return found;
  };
  EXPECT_THAT(matches("a  \n\n b \n"), ElementsAre("  \n", " \n"));
  EXPECT_THAT(matches(" \n x\t"), ElementsAre(" ", "\t"));
  EXPECT_TRUE(matches(std::string(1'000'000, ' ') + "x").empty());
}

}  // namespace
}  // namespace flashgla::text
