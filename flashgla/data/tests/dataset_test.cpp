#include "flashgla/data/dataset.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "flashgla/base/file.h"
#include "flashgla/data/prepare.h"
#include "flashgla/data/tests/test_folder.h"

namespace flashgla::data {
namespace {

using ::testing::HasSubstr;

class Datasets : public FolderTest {
 protected:
  void prepare_folder() {
    std::string text;
    for (int i = 0; i < 2000; ++i) text += "word" + std::to_string(i) + " ";
    write_file(path("in.txt"), text);
    prepare({.inputs = {path("in.txt")}, .out = path("out")});
  }
  std::string refusal(const std::string& what, const OpenOptions& options = {}) {
    return error_of([&] { open_dataset(what, options); });
  }
};

TEST_F(Datasets, AFolderThatWasMeddledWithIsRefused) {
  prepare_folder();
  EXPECT_EQ(refusal(path("out")), "no error");
  const std::string good = read_file(path("out/data.json"));
  const auto with = [&](const std::string& pointer, const nlohmann::json& value) {
    auto json = nlohmann::json::parse(good);
    json[nlohmann::json::json_pointer(pointer)] = value;
    write_file(path("out/data.json"), json.dump());
    return refusal(path("out"));
  };
  EXPECT_THAT(with("/train/tokens", 5), HasSubstr("but data.json says 5"));
  EXPECT_THAT(with("/validation/documents", 7), HasSubstr("validation.bin holds 1 documents"));
  EXPECT_THAT(with("/tokenizer/fingerprint", "0123"), HasSubstr("not the one that made its tokens (0123)"));
  EXPECT_THAT(with("/train", "x"), HasSubstr("damaged"));
  EXPECT_THAT(with("/train/tokens", "x"), HasSubstr("damaged"));
  for (const char* content : {"", "{", "[]", "{}"}) {
    write_file(path("out/data.json"), content);
    EXPECT_THAT(refusal(path("out")), HasSubstr("damaged")) << content;
  }
  write_file(path("out/data.json"), good);
  std::filesystem::resize_file(path("out/validation.bin"), 10);
  EXPECT_THAT(refusal(path("out")), HasSubstr("validation.bin"));
  std::filesystem::remove(path("out/data.json"));
  EXPECT_THAT(refusal(path("out")), HasSubstr("flashgla data prepare"));
  EXPECT_THAT(refusal(path("absent")), HasSubstr("absent"));
}

TEST_F(Datasets, ForeignTokenFilesTakeATokenizer) {
  prepare_folder();
  write_file(path("raw.bin"), std::string("a\0b\0c\0d\0e\0f\0g\0h\0i\0j\0", 20));
  const Dataset alone = open_dataset(path("raw.bin"), {.validation = 0.2});
  EXPECT_EQ(alone.tokenizer, nullptr);
  EXPECT_EQ(alone.vocab_size, 'j' + 1);
  EXPECT_EQ(alone.train.size(), 8);
  EXPECT_EQ(alone.validation.size(), 2);
  const Dataset named = open_dataset(path("raw.bin"), {.tokenizer = path("out")});
  EXPECT_EQ(named.vocab_size, 258);
  EXPECT_EQ(open_dataset(path("out/train.bin")).tokenizer->kind(), "byte") << "found beside it";
  write_file(path("large.bin"), std::string("a\0\2\1", 4));  // 258: one too many
  EXPECT_THAT(refusal(path("large.bin"), {.tokenizer = path("out")}), HasSubstr("token 258"));
  EXPECT_THAT(refusal(path("out"), {.tokenizer = path("out")}), HasSubstr("own tokenizer"));
}

TEST_F(Datasets, OtherTokenizersThanTheModelsAreRefused) {
  prepare_folder();
  prepare({.inputs = {path("in.txt")}, .out = path("pieces"), .tokenizer = "train:280"});
  const Dataset bytes = open_dataset(path("out")), pieces = open_dataset(path("pieces"));
  EXPECT_NO_THROW(require_same_tokenizer(bytes, *bytes.tokenizer, "out"));
  const std::string message = error_of([&] { require_same_tokenizer(bytes, *pieces.tokenizer, "out"); });
  EXPECT_THAT(message, HasSubstr("byte, 258 words"));
  EXPECT_THAT(message, HasSubstr("sentencepiece, 280 words"));
  Dataset foreign = bytes;
  foreign.tokenizer = nullptr;
  EXPECT_NO_THROW(require_same_tokenizer(foreign, *pieces.tokenizer, "raw"));
  foreign.vocab_size = 300;
  EXPECT_THAT(error_of([&] { require_same_tokenizer(foreign, *pieces.tokenizer, "raw"); }), HasSubstr("token 299"));
}

}  // namespace
}  // namespace flashgla::data
