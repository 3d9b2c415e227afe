#include "flashgla/data/prepare.h"

#include <gmock/gmock.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "flashgla/base/file.h"
#include "flashgla/data/dataset.h"
#include "flashgla/data/documents.h"
#include "flashgla/data/tests/test_folder.h"
#include "testing/random.h"

namespace flashgla::data {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

struct Document {
  std::string text;
  std::int64_t stated_bytes;
  double bits;
};

std::vector<Document> read_all(const DocumentOptions& options) {
  DocumentReader reader(options);
  std::vector<Document> documents;
  DocumentPart part;
  bool open = false;
  while (reader.next(part)) {
    if (!open) documents.push_back({"", part.document_bytes, part.bits});
    documents.back().text += part.text;
    open = !part.ends_document;
  }
  EXPECT_FALSE(open);
  return documents;
}

std::vector<std::string> texts(const std::vector<Document>& documents) {
  std::vector<std::string> list;
  list.reserve(documents.size());
  for (const Document& document : documents) list.push_back(document.text);
  return list;
}

class Preparing : public FolderTest {
 protected:
  // The text of a part, specials shown as {257} and the like, one entry a document.
  std::vector<std::string> decoded(const Dataset& dataset, const TokenSpan& span) const {
    std::vector<std::string> documents;
    const std::vector<std::int64_t> begins = span.document_begins();
    for (std::size_t i = 0; i + 1 < begins.size(); ++i) {
      std::vector<std::int32_t> ids(static_cast<std::size_t>(begins[i + 1] - begins[i]));
      span.file->read(span.begin + begins[i], static_cast<std::int64_t>(ids.size()), ids.data());
      std::string text;
      if (ids.front() == dataset.tokenizer->bos_id()) text += "{bos}";
      text += dataset.tokenizer->decode(ids);
      if (ids.back() == dataset.tokenizer->eos_id()) text += "{eos}";
      documents.push_back(text);
    }
    return documents;
  }
  std::string lines_file(int documents) const {
    std::string lines;
    for (int i = 0; i < documents; ++i) {
      lines += nlohmann::json{{"text", "story " + std::to_string(i) + "\n"}, {"bits", 10.0 + i}}.dump() + "\n";
    }
    write_file(path("in.jsonl"), lines);
    return path("in.jsonl");
  }
};

TEST_F(Preparing, ReadsPlainFilesInAnyCut) {
  flashgla::testing::Draws random(2);
  for (const std::size_t size : {0, 1, 5, 1000, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 << 20}) {
    std::string text;
    while (text.size() < size) text += random() % 50 == 0 ? '\n' : 'x';
    write_file(path("a.txt"), text);
    for (const std::size_t part_bytes : {std::size_t{1} << 20, std::size_t{100000}}) {
      const auto documents = read_all({.inputs = {path("a.txt")}, .part_bytes = part_bytes});
      if (size == 0) {
        EXPECT_TRUE(documents.empty());
      } else {
        ASSERT_EQ(documents.size(), 1u);
        EXPECT_TRUE(documents[0].text == text) << size;
        EXPECT_EQ(documents[0].stated_bytes, static_cast<std::int64_t>(size));
      }
    }
  }
}

TEST_F(Preparing, PartsEndAfterNewlines) {
  std::string text;
  for (int i = 0; i < 1000; ++i) text += "line " + std::to_string(i) + "\n";
  write_file(path("a.txt"), text);
  DocumentReader reader({.inputs = {path("a.txt")}, .part_bytes = 100});
  DocumentPart part;
  int parts = 0;
  while (reader.next(part)) {
    ++parts;
    EXPECT_LT(part.text.size(), 120u);
    EXPECT_EQ(part.text.back(), '\n');
  }
  EXPECT_GT(parts, 50);
  EXPECT_EQ(reader.done_bytes(), reader.total_bytes());
}

TEST_F(Preparing, SeparatorsEndDocumentsAcrossBlocks) {
  for (const std::size_t pad : {0, (1 << 20) - 3, (1 << 20) - 1, 1 << 20}) {
    const std::string first(pad, 'a');
    write_file(path("a.txt"), first + "<|end|>second\n<|end|><|end|>third");
    const auto documents = texts(read_all({.inputs = {path("a.txt")}, .separator = "<|end|>"}));
    if (pad == 0) {
      EXPECT_THAT(documents, ElementsAre("second\n", "third"));
    } else {
      ASSERT_EQ(documents.size(), 3u);
      EXPECT_TRUE(documents[0] == first) << pad;
      EXPECT_EQ(documents[2], "third");
    }
  }
}

TEST_F(Preparing, ReadsJsonLinesAndNamesBadOnes) {
  const auto read = [&](const std::string& content, const std::string& field = "text") {
    write_file(path("a.jsonl"), content);
    return texts(read_all({.inputs = {path("a.jsonl")}, .text_field = field}));
  };
  EXPECT_THAT(read("{\"text\":\"a\\u00e9\\n\",\"id\":1}\n\n {\"text\":\"\"}\r\n{\"text\":\"last\"}"),
              ElementsAre("a\u00E9\n", "", "last"));
  EXPECT_THAT(read("{\"body\":\"b\"}\n", "body"), ElementsAre("b"));
  const auto refusal = [&](const std::string& content) { return error_of([&] { read(content); }); };
  EXPECT_THAT(refusal("{\"text\":\"a\"}\n{\"body\":\"b\"}\n"), HasSubstr("line 2: no field \"text\""));
  EXPECT_THAT(refusal("{\"text\":\"a\"}\n\n{\"text\":\"b\n"), HasSubstr("line 3: not a JSON"));
  EXPECT_THAT(refusal("{\"text\":5}\n"), HasSubstr("line 1: field \"text\" is not a text"));
  EXPECT_THAT(refusal("[\"text\"]\n"), HasSubstr("no field"));
  EXPECT_THAT(refusal("{\"text\":\"\xFF\"}\n"), HasSubstr("line 1: not a JSON"));
}

TEST_F(Preparing, FoldersAreReadInOrderWithoutWhatIsNoText) {
  std::filesystem::create_directories(folder_ / "in/sub");
  std::filesystem::create_directories(folder_ / "in/.git");
  std::filesystem::create_directories(folder_ / "in/empty");
  write_file(path("in/b.txt"), "b");
  write_file(path("in/a.txt"), "a");
  write_file(path("in/sub/c.jsonl"), "{\"text\":\"c\"}\n");
  write_file(path("in/binary"), std::string("\0\1", 2));
  write_file(path("in/.hidden"), "hidden");
  write_file(path("in/.git/config"), "hidden");
  EXPECT_THAT(texts(read_all({.inputs = {path("in")}})), ElementsAre("a", "b", "c"));
  DocumentReader reader({.inputs = {path("in")}});
  EXPECT_EQ(reader.passed_over(), 1);
  EXPECT_EQ(reader.count_documents(10), 3);
  EXPECT_EQ(reader.count_documents(2), 2);
  EXPECT_THAT(error_of([&] { DocumentReader({.inputs = {path("absent")}}); }), HasSubstr("absent"));
  EXPECT_THAT(error_of([&] { DocumentReader({.inputs = {path("in/empty")}}); }), HasSubstr("no text files"));
  EXPECT_THAT(error_of([&] { DocumentReader({.inputs = {"-", "-"}}); }), HasSubstr("twice"));
}

TEST_F(Preparing, WhatItMadeIsNoText) {
  std::filesystem::create_directories(folder_ / "in/notes");
  write_file(path("in/a.txt"), "some text");
  write_file(path("in/notes/data.json"), "{}");
  PrepareOptions options = {.inputs = {path("in")}, .out = path("in/tokens"), .validation = 0.0};
  const PrepareReport first = prepare(options);
  EXPECT_EQ(first.passed_over, 0);
  EXPECT_EQ(first.train.documents, 2);
  const PrepareReport again = prepare(options);
  EXPECT_EQ(again.passed_over, 4);  // tokens, index, tokenizer, data.json
  EXPECT_EQ(again.train.text_bytes, first.train.text_bytes);
  options.out = path("in");  // beside the text itself
  for (int time = 0; time < 2; ++time) {
    const PrepareReport beside = prepare(options);
    EXPECT_EQ(beside.train.text_bytes, first.train.text_bytes);
    EXPECT_EQ(beside.passed_over, time == 0 ? 4 : 8);
  }
}

TEST_F(Preparing, TokensOfOthersAreNotWrittenOver) {
  write_file(path("a.txt"), "some text");
  std::filesystem::create_directories(folder_ / "out");
  for (const std::string name : {"train.bin", "validation.bin"}) {
    write_file(path("out/" + name), "theirs");
    EXPECT_THAT(error_of([&] { prepare({.inputs = {path("a.txt")}, .out = path("out")}); }),
                AllOf(HasSubstr("out/" + name + " is there already"), HasSubstr("name another folder")));
    EXPECT_EQ(read_file(path("out/" + name)), "theirs");
    std::filesystem::remove(path("out/" + name));
  }
  prepare({.inputs = {path("a.txt")}, .out = path("out")});
  EXPECT_NO_THROW(prepare({.inputs = {path("a.txt")}, .out = path("out")}));
}

TEST_F(Preparing, ManyDocumentsAreChosenWhole) {
  std::vector<std::int64_t> reported;
  const PrepareReport report =
      prepare({.inputs = {lines_file(200)},
               .out = path("out"),
               .validation = 0.1,
               .progress = [&](std::int64_t done, std::int64_t) { reported.push_back(done); }});
  EXPECT_EQ(report.train.documents, 180);
  EXPECT_EQ(report.validation.documents, 20);
  EXPECT_EQ(reported.back(), static_cast<std::int64_t>(std::filesystem::file_size(path("in.jsonl"))));
  const Dataset dataset = open_dataset(path("out"));
  EXPECT_EQ(dataset.vocab_size, 258);
  const auto train = decoded(dataset, dataset.train), validation = decoded(dataset, dataset.validation);
  std::vector<std::string> expected;
  expected.reserve(200);
  for (int i = 0; i < 200; ++i) expected.push_back("{bos}story " + std::to_string(i) + "\n{eos}");
  std::vector<std::string> all = train;
  all.insert(all.end(), validation.begin(), validation.end());
  EXPECT_THAT(all, ::testing::UnorderedElementsAreArray(expected));
  // One of every ten.
  double bits = 0.0;
  for (std::size_t i = 0; i < validation.size(); ++i) {
    const int number = std::stoi(validation[i].substr(11));
    EXPECT_EQ(number / 10, static_cast<int>(i));
    bits += 10.0 + number;
  }
  EXPECT_NEAR(dataset.validation_entropy_bits_per_byte, bits / static_cast<double>(report.validation.text_bytes),
              1e-12);
  EXPECT_GT(dataset.train_entropy_bits_per_byte, 0.0);
  // A document's targets are its bytes and eos.
  EXPECT_DOUBLE_EQ(dataset.train_bytes_per_target,
                   static_cast<double>(report.train.text_bytes) / (report.train.text_bytes + 180));

  // The same again, and another choice with another seed.
  prepare({.inputs = {path("in.jsonl")}, .out = path("again"), .validation = 0.1, .threads = 1});
  EXPECT_EQ(read_file(path("again/train.bin")), read_file(path("out/train.bin")));
  prepare({.inputs = {path("in.jsonl")}, .out = path("again"), .validation = 0.1, .seed = 1});
  EXPECT_NE(read_file(path("again/train.bin")), read_file(path("out/train.bin")));
}

TEST_F(Preparing, FewDocumentsGiveTheirEnds) {
  std::string text;
  for (int i = 0; i < 400; ++i) text += "caf\u00E9 line " + std::to_string(i) + (i % 3 ? "\n" : "");
  for (const char* tokenizer : {"byte", "train:290"}) {
    write_file(path("one.txt"), text);
    const PrepareReport report =
        prepare({.inputs = {path("one.txt")}, .out = path("out"), .tokenizer = tokenizer, .validation = 0.1});
    const Dataset dataset = open_dataset(path("out"));
    const auto train = decoded(dataset, dataset.train), validation = decoded(dataset, dataset.validation);
    ASSERT_EQ(train.size(), 1u);
    ASSERT_EQ(validation.size(), 1u);
    EXPECT_EQ(train[0] + validation[0], "{bos}" + text + "{eos}");
    EXPECT_EQ(train[0].back(), '\n');
    EXPECT_NEAR(static_cast<double>(report.validation.text_bytes), 0.1 * static_cast<double>(text.size()), 50.0);
    EXPECT_EQ(dataset.train_entropy_bits_per_byte, 0.0);
    EXPECT_EQ(report.tokenizer_kind, dataset.tokenizer->kind());
  }
}

TEST_F(Preparing, LongDocumentsAreCutOnceAcrossParts) {
  std::string text;
  for (int i = 0; text.size() < (5u << 20); ++i) text += "line " + std::to_string(i) + "\n";
  write_file(path("one.txt"), text);
  const PrepareReport report = prepare({.inputs = {path("one.txt")}, .out = path("out"), .validation = 0.3});
  EXPECT_EQ(report.train.documents, 1);
  EXPECT_EQ(report.validation.documents, 1);
  const Dataset dataset = open_dataset(path("out"));
  EXPECT_TRUE(decoded(dataset, dataset.train)[0] + decoded(dataset, dataset.validation)[0] == "{bos}" + text + "{eos}");
  EXPECT_NEAR(static_cast<double>(report.validation.text_bytes) / static_cast<double>(text.size()), 0.3, 0.001);
}

TEST_F(Preparing, WithoutValidationThereIsNone) {
  prepare({.inputs = {lines_file(100)}, .out = path("out"), .validation = 0.5});
  EXPECT_TRUE(std::filesystem::exists(path("out/validation.bin")));
  prepare({.inputs = {path("in.jsonl")}, .out = path("out"), .tokenizer = "train:280", .validation = 0.0});
  EXPECT_FALSE(std::filesystem::exists(path("out/validation.bin")));
  EXPECT_FALSE(std::filesystem::exists(path("out/tokenizer.flashgla.json"))) << "the earlier tokenizer must be gone";
  const Dataset dataset = open_dataset(path("out"));
  EXPECT_EQ(dataset.validation.file, nullptr);
  EXPECT_EQ(dataset.train.file->documents(), 100);
  // A fraction can still be taken when opening.
  EXPECT_NEAR(static_cast<double>(open_dataset(path("out"), {.validation = 0.1}).validation.size()),
              0.1 * static_cast<double>(dataset.train.size()), 20.0);
}

TEST_F(Preparing, WithTheTokenizerOfAnotherFolder) {
  prepare({.inputs = {lines_file(100)}, .out = path("out"), .tokenizer = "train-unigram:275"});
  prepare({.inputs = {path("in.jsonl")}, .out = path("again"), .tokenizer = path("out")});
  EXPECT_EQ(read_file(path("again/train.bin")), read_file(path("out/train.bin")));
  EXPECT_EQ(read_file(path("again/tokenizer.model")), read_file(path("out/tokenizer.model")));
}

TEST_F(Preparing, WhatFailsLeavesTheFolderAsItWas) {
  prepare({.inputs = {lines_file(100)}, .out = path("out")});
  const std::string before = read_file(path("out/train.bin"));
  write_file(path("bad.jsonl"), "{\"text\":\"fine\"}\n{\"text\":\n");
  EXPECT_THAT(error_of([&] { prepare({.inputs = {path("bad.jsonl")}, .out = path("out")}); }), HasSubstr("line 2"));
  EXPECT_EQ(read_file(path("out/train.bin")), before);
  EXPECT_EQ(open_dataset(path("out")).train.file->documents(), 95);
  for (const auto& entry : std::filesystem::directory_iterator(path("out"))) {
    EXPECT_THAT(entry.path().string(), Not(HasSubstr("partial")));
  }
}

TEST_F(Preparing, OptionsThatCannotBeAreNamed) {
  const std::string input = lines_file(10);
  const auto refusal = [&](PrepareOptions options) {
    if (options.inputs.empty()) options.inputs = {input};
    if (options.out.empty()) options.out = path("out");
    return error_of([&] { prepare(options); });
  };
  EXPECT_THAT(refusal({.tokenizer = "train:many"}), HasSubstr("train:8192"));
  EXPECT_THAT(refusal({.tokenizer = "train:30"}), HasSubstr("--tokenizer train:260 or more"));
  EXPECT_THAT(refusal({.tokenizer = "train:100000"}), HasSubstr("--tokenizer train:283 or less"));
  EXPECT_THAT(refusal({.tokenizer = "absent.model"}), HasSubstr("absent.model"));
  EXPECT_THAT(refusal({.tokenizer = input}), HasSubstr("not a SentencePiece model"));
  EXPECT_THAT(refusal({.validation = 0.7}), HasSubstr("0 .. 0.5"));
  EXPECT_THAT(refusal({.out = input}), HasSubstr("not a folder"));
  EXPECT_THAT(refusal({.out = "/proc/no/such"}), HasSubstr("/proc/no/such"));
  write_file(path("empty.txt"), "");
  EXPECT_THAT(refusal({.inputs = {path("empty.txt")}}), HasSubstr("no text"));
}

TEST_F(Preparing, AFullDiskIsReportedAndLeavesNothing) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full here, which is always full";
  // Every write to the train part fails as on a full disk.
  AtomicFile probe(path("probe"));
  probe.write("x");
  const std::string partial = std::filesystem::directory_iterator(folder_)->path().filename().string();
  const std::string suffix = partial.substr(partial.find(".partial"));
  std::filesystem::create_directories(folder_ / "out");
  std::filesystem::create_symlink("/dev/full", folder_ / ("out/train.bin" + suffix));
  EXPECT_THAT(error_of([&] { prepare({.inputs = {lines_file(50)}, .out = path("out")}); }), HasSubstr("No space left"));
  EXPECT_TRUE(std::filesystem::is_empty(folder_ / "out"));
}

}  // namespace
}  // namespace flashgla::data
