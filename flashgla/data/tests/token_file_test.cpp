#include "flashgla/data/token_file.h"

#include <gmock/gmock.h>

#include <cstring>
#include <fstream>

#include "flashgla/base/file.h"
#include "flashgla/data/tests/test_folder.h"
#include "testing/random.h"

namespace flashgla::data {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class TokenFiles : public FolderTest {
 protected:
  std::vector<std::int32_t> all_tokens(const TokenFile& file) const {
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(file.tokens()));
    file.read(0, file.tokens(), tokens.data());
    return tokens;
  }
  // There are thousands: not forced to disk, and removed first because file systems force what is cut to nothing.
  void overwrite(const std::string& name, const std::string& content) {
    std::filesystem::remove(path(name));
    std::ofstream(path(name), std::ios::binary) << content;
  }
  // llm.c's layout.
  void write_llmc(const std::string& name, std::int32_t version, std::int32_t count,
                  std::vector<std::uint16_t> tokens) {
    std::vector<std::int32_t> header(256, 0);
    header[0] = 20240520;
    header[1] = version;
    header[2] = count;
    AtomicFile file(path(name));
    file.write(header.data(), header.size() * 4);
    file.write(tokens.data(), tokens.size() * 2);
    file.finish();
  }
};

TEST_F(TokenFiles, WhatIsWrittenIsRead) {
  for (const std::int64_t vocab_size : {300, 65536, 65537, 1 << 30}) {
    const auto largest = static_cast<std::int32_t>(vocab_size - 1);
    TokenFileWriter writer(path("tokens"), vocab_size);
    writer.append(std::vector<std::int32_t>{1, 2});
    writer.append(std::vector<std::int32_t>{largest});
    writer.end_document();
    writer.end_document();  // empty: not recorded
    writer.append(std::vector<std::int32_t>{4});
    writer.end_document();
    writer.append(std::vector<std::int32_t>{5, 6});  // ended by publish
    EXPECT_FALSE(std::filesystem::exists(path("tokens.bin")) && vocab_size == 300);
    writer.publish();
    for (const char* name : {"tokens.bin", "tokens.idx", "tokens"}) {
      const auto file = TokenFile::open(path(name));
      EXPECT_EQ(file->format(), TokenFormat::megatron);
      EXPECT_EQ(file->dtype(), vocab_size <= 65536 ? DType::u16 : DType::i32);
      EXPECT_EQ(file->documents(), 3);
      EXPECT_THAT(file->document_begins(), ElementsAre(0, 3, 4, 6));
      EXPECT_THAT(all_tokens(*file), ElementsAre(1, 2, largest, 4, 5, 6));
      EXPECT_EQ(file->largest_token(), largest);
    }
  }
}

// The very bytes of Megatron's layout, worked out by hand.
TEST_F(TokenFiles, TheIndexIsMegatrons) {
  TokenFileWriter writer(path("tokens"), 1000);
  writer.append(std::vector<std::int32_t>{7, 258, 9});
  writer.end_document();
  writer.append(std::vector<std::int32_t>{1});
  writer.publish();
  EXPECT_EQ(read_file(path("tokens.bin")), std::string("\7\0\2\1\11\0\1\0", 8));
  std::string expected("MMIDIDX\0\0", 9);
  expected += std::string("\1\0\0\0\0\0\0\0", 8) + "\10";
  expected += std::string("\2\0\0\0\0\0\0\0", 8) + std::string("\3\0\0\0\0\0\0\0", 8);
  expected += std::string("\3\0\0\0\1\0\0\0", 8);
  expected += std::string("\0\0\0\0\0\0\0\0\6\0\0\0\0\0\0\0", 16);
  expected += std::string("\0\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0\2\0\0\0\0\0\0\0", 24);
  EXPECT_EQ(read_file(path("tokens.idx")), expected);
}

TEST_F(TokenFiles, AnAbandonedWriterLeavesNothing) {
  { TokenFileWriter(path("tokens"), 10).append(std::vector<std::int32_t>{1}); }
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
}

TEST_F(TokenFiles, TokensOutsideTheVocabularyAreRefused) {
  TokenFileWriter writer(path("tokens"), 10);
  EXPECT_THAT(error_of([&] { writer.append(std::vector<std::int32_t>{10}); }), HasSubstr("is 10; expected 0 .. 9"));
  EXPECT_THAT(error_of([&] { writer.append(std::vector<std::int32_t>{-1}); }), HasSubstr("is -1"));
}

TEST_F(TokenFiles, ReadsNanogptAndLlmc) {
  write_file(path("raw.bin"), std::string("\1\0\2\1\3\0", 6));
  write_llmc("llmc.bin", 1, 3, {1, 258, 3});
  const auto raw = TokenFile::open(path("raw.bin"));
  const auto llmc = TokenFile::open(path("llmc.bin"));
  EXPECT_EQ(raw->format(), TokenFormat::nanogpt);
  EXPECT_EQ(llmc->format(), TokenFormat::llmc);
  for (const auto& file : {raw, llmc}) {
    EXPECT_THAT(all_tokens(*file), ElementsAre(1, 258, 3));
    EXPECT_THAT(file->document_begins(), ElementsAre(0, 3));
  }
  // Megatron's .bin is a raw stream too.
  counting_file({3}, "both");
  EXPECT_EQ(TokenFile::open(path("both.bin"), TokenFormat::nanogpt)->tokens(), 6);
}

TEST_F(TokenFiles, ErrorsNameFileAndRemedy) {
  const auto open = [&](const std::string& name, TokenFormat format = TokenFormat::automatic) {
    return error_of([&] { TokenFile::open(path(name), format); });
  };
  EXPECT_THAT(open("absent.bin"), HasSubstr("absent.bin"));
  EXPECT_THAT(open("absent.idx"), HasSubstr("absent.idx"));
  EXPECT_THAT(open(""), HasSubstr("flashgla data prepare"));
  write_file(path("text.txt"), "some text");
  EXPECT_THAT(open("text.txt"), HasSubstr("text.txt is no token file (.bin)"));
  EXPECT_THAT(open("text.txt", TokenFormat::nanogpt), HasSubstr("truncated"));
  write_file(path("odd.bin"), "abc");
  EXPECT_THAT(open("odd.bin"), HasSubstr("truncated"));
  write_file(path("empty.bin"), "");
  EXPECT_THAT(open("empty.bin"), HasSubstr("holds no tokens"));
  EXPECT_THAT(open("odd.bin", TokenFormat::megatron), HasSubstr("odd.idx is missing"));
  EXPECT_THAT(open("odd.bin", TokenFormat::llmc), HasSubstr("20240520"));
  write_llmc("short.bin", 1, 4, {1, 2, 3});
  EXPECT_THAT(open("short.bin"), HasSubstr("4 tokens"));
  write_llmc("negative.bin", 1, -1, {1, 2, 3});
  EXPECT_THAT(open("negative.bin"), HasSubstr("-1 tokens"));
  write_llmc("version.bin", 2, 3, {1, 2, 3});
  EXPECT_THAT(open("version.bin"), HasSubstr("version is 2"));
  EXPECT_THAT(error_of([] { token_format_from_name("csv"); }), HasSubstr("megatron"));
}

TEST_F(TokenFiles, TruncatedPairsAreRefusedAtEveryLength) {
  counting_file({3, 1, 5});
  const std::string bin = read_file(path("tokens.bin")), idx = read_file(path("tokens.idx"));
  for (std::size_t size = 0; size < bin.size(); ++size) {
    overwrite("tokens.bin", bin.substr(0, size));
    EXPECT_THAT(error_of([&] { TokenFile::open(path("tokens.bin")); }), HasSubstr("truncated")) << size;
  }
  overwrite("tokens.bin", bin + "more");
  EXPECT_THAT(error_of([&] { TokenFile::open(path("tokens.bin")); }), HasSubstr("tokens.bin"));
  overwrite("tokens.bin", bin);
  for (std::size_t size = 0; size < idx.size(); ++size) {
    overwrite("tokens.idx", idx.substr(0, size));
    EXPECT_THAT(error_of([&] { TokenFile::open(path("tokens.bin")); }), HasSubstr("tokens.idx")) << size;
  }
}

// Damage anywhere in the index is refused or harmless: no token outside the file is ever read.
TEST_F(TokenFiles, FuzzedIndexesNeverCrash) {
  counting_file({3, 1, 5, 2});
  const std::string idx = read_file(path("tokens.idx"));
  flashgla::testing::Draws random(3);
  int refused = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    std::string damaged = idx;
    const int changes = 1 + static_cast<int>(random() % 3);
    for (int i = 0; i < changes; ++i) {
      const std::size_t at = random() % damaged.size();
      if (random() % 2 == 0 && at + 8 <= damaged.size()) {
        const std::int64_t extreme[] = {-1, std::numeric_limits<std::int64_t>::max(),
                                        std::numeric_limits<std::int64_t>::min(), 1 << 30};
        std::memcpy(damaged.data() + at, &extreme[random() % 4], 8);
      } else {
        damaged[at] = static_cast<char>(random());
      }
    }
    if (random() % 8 == 0) damaged.resize(random() % damaged.size());
    overwrite("tokens.idx", damaged);
    try {
      const auto file = TokenFile::open(path("tokens.bin"));
      EXPECT_EQ(file->document_begins().back(), file->tokens());
      std::vector<std::int32_t> tokens(static_cast<std::size_t>(file->tokens()));
      file->read(0, file->tokens(), tokens.data());
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 2000);
}

TEST_F(TokenFiles, ReadingOutsideIsRefused) {
  const TokenSpan span = counting_file({4});
  std::int32_t out[8];
  EXPECT_THROW(span.file->read(0, 5, out), Error);
  EXPECT_THROW(span.file->read(-1, 1, out), Error);
  EXPECT_THROW(span.file->read(4, 1, out), Error);
  EXPECT_NO_THROW(span.file->read(4, 0, out));
}

TEST_F(TokenFiles, NegativeTokensAreFound) {
  counting_file({4});
  std::string bin = read_file(path("tokens.bin"));
  bin[7] = '\x80';
  write_file(path("tokens.bin"), bin);
  const auto file = TokenFile::open(path("tokens.bin"));
  std::int32_t out[4];
  EXPECT_THAT(error_of([&] { file->read(0, 4, out); }), HasSubstr("at 1"));
}

TEST_F(TokenFiles, SplitsAtDocumentsWhenTheyAreNear) {
  const TokenSpan documents = counting_file(std::vector<std::int64_t>(100, 10));
  const auto [train, validation] = split(documents, 0.053);
  EXPECT_EQ(train.size(), 950);
  EXPECT_EQ(validation.size(), 50);
  EXPECT_THAT(validation.document_begins(), ElementsAre(0, 10, 20, 30, 40, 50));
  const TokenSpan one = counting_file({1000}, "one");
  EXPECT_EQ(split(one, 0.1).second.size(), 100);
  const TokenSpan uneven = counting_file({500, 500}, "uneven");
  EXPECT_EQ(split(uneven, 0.1).second.size(), 100) << "a boundary far away must not change the sizes";
  EXPECT_THAT(split(uneven, 0.1).first.document_begins(), ElementsAre(0, 500, 900));
  EXPECT_THROW(split(one, 0.0), Error);
  EXPECT_THROW(split(one, 1.0), Error);
}

}  // namespace
}  // namespace flashgla::data
