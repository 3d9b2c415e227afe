#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <thread>

#include "flashgla/base/error.h"
#include "flashgla/base/file.h"
#include "flashgla/text/tokenizer.h"
#include "flashgla/text/utf8.h"
#include "testing/random.h"

namespace flashgla::text {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

const char* const kWords[] = {"the", "river", "was",   "cold",  "and",    "Mira",  "carried", "a",     "lamp",
                              "she", "had",   "found", "under", "bridge", "where", "two",     "roads", "meet"};

std::string sample_text(int lines) {
  flashgla::testing::Draws random(7);
  std::string text;
  for (int i = 0; i < lines; ++i) {
    for (int word = 0; word < 9; ++word) text += std::string(word ? " " : "") + kWords[random() % std::size(kWords)];
    text += i % 5 ? ", 1984.\n" : " caf\u00E9 \u4F60\u597D!\n\n";
  }
  return text;
}

TextSource source_of(const std::string& text, std::size_t piece = 1000) {
  return [&text, piece, at = std::size_t{0}](std::string& out) mutable {
    if (at >= text.size()) return false;
    out = text.substr(at, piece);
    at += piece;
    return true;
  };
}

const Tokenizer& trained(const std::string& model_type) {
  static const std::string text = sample_text(800);
  static const auto bpe = train_sentencepiece(source_of(text), {.vocab_size = 350, .model_type = "bpe"});
  static const auto unigram = train_sentencepiece(source_of(text), {.vocab_size = 350, .model_type = "unigram"});
  return model_type == "bpe" ? *bpe : *unigram;
}

std::vector<const Tokenizer*> all_tokenizers() {
  static const auto bytes = make_byte_tokenizer();
  return {bytes.get(), &trained("bpe"), &trained("unigram")};
}

// Texts that tokenizers stumble over, and random ones: bytes, and characters of every length.
std::vector<std::string> hard_texts() {
  std::vector<std::string> texts = {
      "",
      " ",
      "  leading and trailing  ",
      "a\n\n\tb\r\n",
      std::string("nul \0 inside", 12),
      "\u2581 is the sign for a space",
      "<s></s><unk><0x41> are only text",
      "a\u0301 and \u00E1, \uFB01, \u2460, \u3000, \u200B, \uFEFF",
      "\U0001F600\U0001F468\u200D\U0001F469",
      "\xFF\xFE cut \xE2\x96",
      "\xC0\x80 \xED\xA0\x80 \xF4\x90\x80\x80",
      "the river was cold and Mira carried a lamp",
      sample_text(3),
      std::string(5000, ' '),
      std::string(5000, 'a'),
  };
  flashgla::testing::Draws random(1);
  for (int i = 0; i < 200; ++i) {
    std::string text;
    const int length = static_cast<int>(random() % 60);
    for (int j = 0; j < length; ++j) {
      const std::uint64_t draw = random();
      if (i % 2 == 0) {
        text += static_cast<char>(draw);
      } else if (draw % 3 == 0) {
        text += kWords[(draw >> 8) % std::size(kWords)];
      } else {
        text +=
            std::string_view("\u00E9\u4F60\U0001F600 \n\u2581\xE2z.").substr((draw >> 8) % 12, 1 + (draw >> 16) % 5);
      }
    }
    texts.push_back(text);
  }
  return texts;
}

TEST(Utf8, TellsEveryKindOfSequence) {
  const auto is = [](std::string_view text, Utf8 status, std::size_t length) {
    const Utf8Character character = first_character(text);
    return character.status == status && character.length == length;
  };
  EXPECT_TRUE(is("az", Utf8::valid, 1));
  EXPECT_TRUE(is("\u00E9z", Utf8::valid, 2));
  EXPECT_TRUE(is("\u20ACz", Utf8::valid, 3));
  EXPECT_TRUE(is("\U0001F600z", Utf8::valid, 4));
  EXPECT_TRUE(is("\xF0\x9F\x98", Utf8::truncated, 3));
  EXPECT_TRUE(is("\xF0\x9F\x98z", Utf8::invalid, 3));
  EXPECT_TRUE(is("\x80", Utf8::invalid, 1));
  EXPECT_TRUE(is("\xC1\x81", Utf8::invalid, 1));          // overlong
  EXPECT_TRUE(is("\xE0\x80\x80", Utf8::invalid, 1));      // overlong
  EXPECT_TRUE(is("\xED\xA0\x80", Utf8::invalid, 1));      // surrogate
  EXPECT_TRUE(is("\xF4\x90\x80\x80", Utf8::invalid, 1));  // past U+10FFFF
  EXPECT_TRUE(is("\xF5\x80\x80\x80", Utf8::invalid, 1));
}

TEST(Tokenizer, EveryTextComesBack) {
  for (const Tokenizer* tokenizer : all_tokenizers()) {
    ASSERT_TRUE(tokenizer->lossless());
    for (const std::string& text : hard_texts()) {
      const TokenIds ids = tokenizer->encode(text);
      for (const std::int32_t id : ids) {
        ASSERT_GE(id, 0);
        ASSERT_LT(id, tokenizer->vocab_size());
        ASSERT_FALSE(tokenizer->is_special(id)) << "text must not become special tokens";
      }
      ASSERT_EQ(tokenizer->decode(ids), text) << tokenizer->kind();
    }
  }
}

TEST(Tokenizer, LongTextsMayBeCutAfterNewlines) {
  const std::string text = sample_text(20);
  for (const Tokenizer* tokenizer : all_tokenizers()) {
    ASSERT_TRUE(tokenizer->splits_at_newlines());
    TokenIds joined;
    for (std::size_t begin = 0; begin < text.size();) {
      const std::size_t end = text.find('\n', begin) + 1;
      const TokenIds line = tokenizer->encode(std::string_view(text).substr(begin, end - begin));
      joined.insert(joined.end(), line.begin(), line.end());
      begin = end;
    }
    EXPECT_EQ(joined, tokenizer->encode(text)) << tokenizer->kind();
  }
}

// Words are encoded by themselves and remembered; the ids must be those of libsentencepiece for the whole text.
TEST(Tokenizer, AgreesWithTheLibraryOnWholeTexts) {
  for (const char* type : {"bpe", "unigram"}) {
    const fs::path folder = fs::path(::testing::TempDir()) / "flashgla_whole_texts";
    fs::create_directories(folder);
    trained(type).save(folder);
    sentencepiece::SentencePieceProcessor processor;
    ASSERT_TRUE(processor.Load((folder / "tokenizer.model").string()).ok());
    std::vector<std::string> texts = {"the   river  was cold ", "  ", " a", "a ",
                                      "unseen wordthewas \t tab\n\nnew  line\n "};
    for (int lines = 1; lines < 60; ++lines) texts.push_back(sample_text(lines));
    for (const std::string& text : texts) {
      ASSERT_EQ(trained(type).encode(text), processor.EncodeAsIds(text)) << type << ": " << text;
    }
    fs::remove_all(folder);
  }
}

TEST(Tokenizer, MayBeSharedByThreads) {
  const std::string text = sample_text(200);
  const TokenIds expected = trained("bpe").encode(text);
  const auto fresh = [] {
    const std::string corpus = sample_text(800);
    return train_sentencepiece(source_of(corpus), {.vocab_size = 350});
  }();
  std::vector<std::thread> threads;
  std::atomic<int> equal{0};
  threads.reserve(4);
  for (int i = 0; i < 4; ++i) threads.emplace_back([&] { equal += fresh->encode(text) == expected; });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(equal, 4);
}

TEST(Tokenizer, TrainedModelsShortenTheirText) {
  const std::string text = sample_text(50);
  for (const char* type : {"bpe", "unigram"}) {
    EXPECT_EQ(trained(type).vocab_size(), 350);
    EXPECT_LT(trained(type).encode(text).size() * 2, text.size()) << type;
  }
}

TEST(Tokenizer, TrainingIsRepeatable) {
  const std::string text = sample_text(100);
  const auto first = train_sentencepiece(source_of(text), {.vocab_size = 300});
  const auto second = train_sentencepiece(source_of(text), {.vocab_size = 300});
  EXPECT_EQ(first->fingerprint(), second->fingerprint());
}

TEST(Tokenizer, TrainingOnTooLittleTextSaysSo) {
  const std::string text = "a small text";
  for (const char* type : {"bpe", "unigram"}) {
    try {
      train_sentencepiece(source_of(text), {.vocab_size = 4000, .model_type = type});
      FAIL() << type;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("a vocabulary of 4000 is too large for this text, which allows at most "));
    }
    try {
      train_sentencepiece(source_of(text), {.vocab_size = 262, .model_type = type});
      FAIL() << type;
    } catch (const VocabularyError& error) {
      EXPECT_THAT(error.what(), HasSubstr("262 is too small for the characters of this text"));
      EXPECT_GT(error.possible, 262);
      EXPECT_NO_THROW(train_sentencepiece(source_of(text), {.vocab_size = error.possible, .model_type = type}));
    }
  }
  EXPECT_THROW(train_sentencepiece(source_of(std::string()), {}), Error);
  EXPECT_THROW(train_sentencepiece(source_of(text), {.vocab_size = 100}), Error);
  EXPECT_THROW(train_sentencepiece(source_of(text), {.model_type = "word"}), Error);
}

TEST(Tokenizer, SpecialsDecodeToNothing) {
  for (const Tokenizer* tokenizer : all_tokenizers()) {
    TokenIds ids = tokenizer->encode("Mira");
    ids.insert(ids.begin(), tokenizer->bos_id());
    ids.push_back(tokenizer->eos_id());
    EXPECT_EQ(tokenizer->decode(ids), "Mira");
    const std::int32_t outside[] = {static_cast<std::int32_t>(tokenizer->vocab_size())};
    EXPECT_THROW(tokenizer->decode(outside), Error);
    const std::int32_t negative[] = {-1};
    EXPECT_THROW(tokenizer->decode(negative), Error);
  }
}

// As LLaMA's: a space before the text, runs of spaces collapsed, compatibility forms replaced.
TEST(Tokenizer, ForeignModelsAreFollowedAsTheyAre) {
  const fs::path file = fs::path(::testing::TempDir()) / "flashgla_foreign.model";
  const fs::path corpus = fs::path(::testing::TempDir()) / "flashgla_foreign.txt";
  write_file(corpus, sample_text(500));
  std::string model;
  ASSERT_TRUE(sentencepiece::SentencePieceTrainer::Train({{"input", corpus},
                                                          {"model_prefix", ""},
                                                          {"vocab_size", "360"},
                                                          {"model_type", "bpe"},
                                                          {"byte_fallback", "true"},
                                                          {"minloglevel", "2"}},
                                                         nullptr, &model)
                  .ok());
  write_file(file, model);
  const auto tokenizer = load_tokenizer(file);
  sentencepiece::SentencePieceProcessor processor;
  ASSERT_TRUE(processor.Load(file.string()).ok());
  EXPECT_FALSE(tokenizer->lossless());
  EXPECT_FALSE(tokenizer->splits_at_newlines());
  for (const std::string text : {"the river was cold", "two  spaces ", "\uFB01ne \U0001F600", "", " "}) {
    const TokenIds ids = tokenizer->encode(text);
    EXPECT_EQ(ids, processor.EncodeAsIds(text));
    EXPECT_EQ(tokenizer->decode(ids), processor.DecodeIds(ids)) << text;
    StreamDecoder decoder(*tokenizer);
    std::string out = decoder.push(tokenizer->bos_id());
    for (const std::int32_t id : ids) out += decoder.push(id);
    EXPECT_EQ(out + decoder.finish(), processor.DecodeIds(ids)) << text;
  }
  tokenizer->encode("broken \xFF bytes");  // replaced by SentencePiece, not refused
  fs::remove(file);
  fs::remove(corpus);
}

class TokenizerFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(::testing::TempDir()) /
              ("flashgla_" + std::string(::testing::UnitTest::GetInstance()->current_test_info()->name()));
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  fs::path folder_;
};

TEST_F(TokenizerFiles, SavedAndLoadedIsTheSame) {
  std::vector<std::string> fingerprints;
  for (const Tokenizer* tokenizer : all_tokenizers()) {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    tokenizer->save(folder_);
    const auto loaded = load_tokenizer(folder_);
    EXPECT_EQ(loaded->kind(), tokenizer->kind());
    EXPECT_EQ(loaded->fingerprint(), tokenizer->fingerprint());
    EXPECT_EQ(loaded->encode("the lamp \xFF"), tokenizer->encode("the lamp \xFF"));
    fingerprints.push_back(loaded->fingerprint());
    const auto from_file = load_tokenizer(fs::directory_iterator(folder_)->path());
    EXPECT_EQ(from_file->fingerprint(), tokenizer->fingerprint());
  }
  EXPECT_NE(fingerprints[0], fingerprints[1]);
  EXPECT_NE(fingerprints[1], fingerprints[2]);
}

TEST_F(TokenizerFiles, DamagedFilesAreNamed) {
  const auto message = [&](const std::string& path) {
    try {
      load_tokenizer(path);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  EXPECT_THAT(message(folder_), HasSubstr("tokenizer.model"));
  EXPECT_THAT(message(folder_ / "absent"), HasSubstr("absent"));
  for (const char* content : {"", "{", "[]", "{\"kind\":\"byte\"}", "{\"kind\":\"other\",\"vocab_size\":258}"}) {
    write_file(folder_ / "tokenizer.flashgla.json", content);
    EXPECT_THAT(message(folder_), HasSubstr("tokenizer.flashgla.json")) << content;
  }
  trained("bpe").save(folder_);
  const std::string whole = read_file(folder_ / "tokenizer.model");
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{1}, whole.size() / 3, whole.size() / 2, whole.size() - 1}) {
    write_file(folder_ / "tokenizer.model", whole.substr(0, size));
    EXPECT_THAT(message(folder_), HasSubstr("tokenizer.model")) << size;
  }
}

// libsentencepiece is not ours: what it makes of a damaged model must be an Error or a tokenizer that can be used.
TEST_F(TokenizerFiles, FuzzedModelsNeverCrash) {
  trained("bpe").save(folder_);
  const std::string whole = read_file(folder_ / "tokenizer.model");
  flashgla::testing::Draws random(4);
  int refused = 0;
  for (int trial = 0; trial < 500; ++trial) {
    std::string damaged = whole;
    for (std::uint64_t i = 0; i <= random() % 4; ++i) damaged[random() % damaged.size()] = static_cast<char>(random());
    fs::remove(folder_ / "fuzzed.model");
    std::ofstream(folder_ / "fuzzed.model", std::ios::binary) << damaged;
    try {
      const auto tokenizer = load_tokenizer(folder_ / "fuzzed.model");
      tokenizer->decode(tokenizer->encode("the river \xFF was\n cold"));
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 100);
}

TEST(StreamDecoder, SplitsNoCharacterAtAnyByte) {
  const auto bytes = make_byte_tokenizer();
  const std::string text = "a\u00E9\u20AC\U0001F600z\u4F60";
  StreamDecoder decoder(*bytes);
  std::string out;
  for (const std::int32_t id : bytes->encode(text)) {
    const std::string part = decoder.push(id);
    for (std::size_t i = 0; i < part.size();) {
      const Utf8Character character = first_character(std::string_view(part).substr(i));
      ASSERT_EQ(character.status, Utf8::valid);
      i += character.length;
    }
    ASSERT_LT(decoder.held_bytes(), 4u);
    out += part;
  }
  EXPECT_EQ(out, text);
  EXPECT_EQ(decoder.finish(), "");
}

TEST(StreamDecoder, BrokenBytesBecomeReplacementCharacters) {
  const auto bytes = make_byte_tokenizer();
  const auto run = [&](std::string_view text) {
    StreamDecoder decoder(*bytes);
    std::string out;
    for (const std::int32_t id : bytes->encode(text)) out += decoder.push(id);
    return out + decoder.finish();
  };
  const std::string r(kReplacementCharacter);
  EXPECT_EQ(run("a\xFFz"), "a" + r + "z");
  EXPECT_EQ(run("\xE2\x82z"), r + "z");
  EXPECT_EQ(run("\xE2\x82\xE2\x82\xAC"), r + "\u20AC");
  EXPECT_EQ(run("\xF0\x9F"), r);
  EXPECT_EQ(run("\x80\x80"), r + r);
}

TEST(StreamDecoder, AgreesWithDecodingAllAtOnce) {
  for (const Tokenizer* tokenizer : all_tokenizers()) {
    for (const std::string text : {"the river was caf\u00E9 \u4F60\u597D \U0001F600!", "  two spaces", "\n"}) {
      StreamDecoder decoder(*tokenizer);
      std::string out = decoder.push(tokenizer->bos_id());
      for (const std::int32_t id : tokenizer->encode(text)) out += decoder.push(id);
      out += decoder.push(tokenizer->eos_id());
      EXPECT_EQ(out + decoder.finish(), text);
    }
  }
}

}  // namespace
}  // namespace flashgla::text
