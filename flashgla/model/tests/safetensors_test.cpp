#include "flashgla/model/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "testing/compare.h"
#include "testing/random.h"
#include "testing/temporary_folder.h"

namespace flashgla::model {
namespace {

using ::testing::HasSubstr;

std::string file_bytes(const std::string& header, const std::string& data = "") {
  std::string bytes(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(header.size() >> (8 * i) & 0xff);
  return bytes + header + data;
}

class Safetensors : public ::testing::Test {
 protected:
  // "" when the file opens and reads, else the error's message without the path.
  std::string error_of(const std::string& bytes) {
    const std::string path = folder_ / "x";
    testing::write_bytes(path, bytes);
    try {
      const SafetensorsReader file(path);
      file.read([](const StoredTensor&) { return TensorView(); });
    } catch (const Error& error) {
      const std::string message = error.what();
      EXPECT_THAT(message, HasSubstr(path));
      EXPECT_EQ(message.find('\n'), std::string::npos);
      return message.substr(path.size() + 2);
    }
    return "";
  }

  testing::TemporaryFolder folder_;
};

TEST_F(Safetensors, RoundTripOfEveryDtypeAndShape) {
  std::vector<Tensor> tensors;
  std::vector<NamedTensor> named;
  const Shape shapes[] = {Shape({3, 5}), Shape({7}), Shape(), Shape({0, 4}), Shape({2, 1, 3})};
  for (const DType dtype :
       {DType::f64, DType::f32, DType::bf16, DType::f16, DType::i64, DType::i32, DType::u16, DType::u8}) {
    for (const Shape& shape : shapes) {
      tensors.push_back(Tensor::empty(shape, dtype));
      for (std::size_t i = 0; i < tensors.back()->bytes(); ++i) {
        static_cast<std::uint8_t*>(tensors.back()->data)[i] = static_cast<std::uint8_t>(i * 7 + tensors.size());
      }
    }
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) named.push_back({"tensor." + std::to_string(i), tensors[i]});
  const std::string path = folder_ / "all.safetensors";
  write_safetensors(path, named, {{"note", "ümlaut \"quoted\""}});

  const SafetensorsReader file(path);
  EXPECT_EQ(file.tensors().size(), named.size());
  EXPECT_EQ(file.metadata().at("format"), "pt");
  EXPECT_EQ(file.metadata().at("note"), "ümlaut \"quoted\"");
  std::vector<Tensor> copies;
  std::vector<NamedTensor> destinations;
  for (const NamedTensor& row : named) {
    copies.push_back(Tensor::zeros(row.tensor.shape, row.tensor.dtype));
    destinations.push_back({row.name, copies.back()});
  }
  file.read(destinations);
  for (std::size_t i = 0; i < named.size(); ++i) {
    EXPECT_EQ(std::memcmp(copies[i]->data, tensors[i]->data, tensors[i]->bytes()), 0) << i;
  }
  const std::string bytes = testing::read_bytes(path);
  EXPECT_EQ((static_cast<unsigned char>(bytes[0]) + 8) % 8, 0) << "the header is padded to 8 bytes";
}

TEST_F(Safetensors, FloatingDtypesAreConvertedAndOthersRefused) {
  const Tensor values = testing::random_normal(Shape({9, 11}), DType::f32, 1);
  const Tensor counts = Tensor::zeros(Shape({4}), DType::i32);
  const std::string path = folder_ / "x";
  write_safetensors(path, {{"values", values}, {"counts", counts}});
  const SafetensorsReader file(path);
  const auto read_into = [&](const char* name, const TensorView& view) {
    file.read([&](const StoredTensor& stored) { return stored.name == name ? view : TensorView(); });
  };
  for (const DType dtype : {DType::f64, DType::bf16, DType::f16}) {
    const Tensor copy = Tensor::empty(values->shape, dtype);
    read_into("values", copy);
    EXPECT_TRUE(testing::same_bits(copy, testing::converted(values, dtype)));
  }
  const Tensor other = Tensor::empty(Shape({4}), DType::f32);
  EXPECT_THROW(read_into("counts", other), Error);
  EXPECT_THROW(read_into("values", other), Error);
  EXPECT_THROW(file.read({{"values", values}}), Error) << "counts is not expected";
  EXPECT_THROW(file.read({{"values", values}, {"counts", counts}, {"more", counts}}), Error);
}

TEST_F(Safetensors, ForeignButValidFilesAreRead) {
  EXPECT_EQ(error_of(file_bytes("{}")), "");
  EXPECT_EQ(error_of(file_bytes("{}   ")), "");
  EXPECT_EQ(error_of(file_bytes(R"({"b":{"dtype":"F8_E4M3","shape":[3],"data_offsets":[2,5]},)"
                                R"("a":{"dtype":"BOOL","shape":[2],"data_offsets":[0,2]}})",
                                "12345")),
            "");
  EXPECT_EQ(error_of(file_bytes(R"({"s":{"dtype":"F32","shape":[],"data_offsets":[0,4]},)"
                                R"("e":{"dtype":"F32","shape":[9223372036854775807,0,9],"data_offsets":[4,4]}})",
                                "1234")),
            "");
  EXPECT_EQ(error_of(file_bytes(R"({"r":{"dtype":"U8","shape":[1,1,1,1,1,1,2],"data_offsets":[0,2]}})", "12")), "");
}

TEST_F(Safetensors, EveryDefectIsNamed) {
  const auto tensor = [](const char* name, const char* dtype, const char* shape, const char* offsets) {
    return std::string("\"") + name + R"(":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" +
           offsets + "}";
  };
  const std::string good = tensor("a", "F32", "[2]", "[0,8]");
  const std::string data8(8, 'x');
  EXPECT_EQ(error_of(file_bytes("{" + good + "}", data8)), "");
  EXPECT_THAT(error_of(""), HasSubstr("truncated or not a safetensors file"));
  EXPECT_THAT(error_of("1234567"), HasSubstr("truncated or not a safetensors file"));
  EXPECT_THAT(error_of(std::string("\x01\xe1\xf5\x05\0\0\0\0", 8)), HasSubstr("100000001 bytes; at most 100000000"));
  EXPECT_THAT(error_of(std::string(8, '\xff') + "{}"), HasSubstr("at most 100000000"));
  EXPECT_THAT(error_of(std::string("\x00\xe1\xf5\x05\0\0\0\0{}", 10)), HasSubstr("truncated"));
  EXPECT_THAT(error_of(file_bytes("")), HasSubstr("does not start with '{'"));
  EXPECT_THAT(error_of(file_bytes(" {}")), HasSubstr("does not start with '{'"));
  EXPECT_THAT(error_of(file_bytes("{\"a\"")), HasSubstr("not JSON"));
  EXPECT_THAT(error_of(file_bytes("{} x")), HasSubstr("not JSON"));
  EXPECT_THAT(error_of(file_bytes("{\"\xff\":1}")), HasSubstr("not JSON"));
  EXPECT_THAT(error_of(file_bytes("{" + good + "," + good + "}", data8)), HasSubstr("names 'a' twice"));
  EXPECT_THAT(error_of(file_bytes(R"({"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}})", data8)),
              HasSubstr("names 'dtype' twice"));
  EXPECT_THAT(error_of(file_bytes("{\"a\":" + std::string(100000, '['))), HasSubstr("nested too deeply"));
  EXPECT_THAT(error_of(file_bytes("{\"a\":3}")), HasSubstr("tensor 'a' has no dtype"));
  EXPECT_THAT(error_of(file_bytes("{" + tensor("a", "F31", "[2]", "[0,8]") + "}", data8)), HasSubstr("'F31'"));
  EXPECT_THAT(error_of(file_bytes("{" + tensor("a", "F32", "[2]", "[0,8,8]") + "}", data8)), HasSubstr("wrong type"));
  EXPECT_THAT(error_of(file_bytes("{" + tensor("a", "F32", "[2]", "[0,8.0]") + "}", data8)), HasSubstr("wrong type"));
  EXPECT_THAT(error_of(file_bytes("{" + tensor("a", "F32", "[-2]", "[0,8]") + "}", data8)), HasSubstr("no count"));
  EXPECT_THAT(error_of(file_bytes("{" + tensor("a", "F32", "[3]", "[0,8]") + "}", data8)), HasSubstr("12 bytes"));
  EXPECT_THAT(error_of(file_bytes("{" + tensor("a", "F32", "[2]", "[8,0]") + "}", data8)), HasSubstr("[8,0]"));
  EXPECT_THAT(error_of(file_bytes("{" + tensor("a", "F32", "[4611686018427387904,4]", "[0,0]") + "}")),
              HasSubstr("larger than any file"));
  EXPECT_THAT(error_of(file_bytes("{" + tensor("a", "F32", "[18446744073709551615]", "[0,8]") + "}", data8)),
              HasSubstr("no count"));
  EXPECT_THAT(error_of(file_bytes("{" + good + "}", "1234567")), HasSubstr("truncated"));
  EXPECT_THAT(error_of(file_bytes("{" + good + "}", data8 + "9")), HasSubstr("more data"));
  EXPECT_THAT(error_of(file_bytes("{" + good + "," + tensor("b", "F32", "[2]", "[4,12]") + "}", data8 + "1234")),
              HasSubstr("inside the one before"));
  EXPECT_THAT(error_of(file_bytes("{" + good + "," + tensor("b", "F32", "[1]", "[9,13]") + "}", data8 + "12345")),
              HasSubstr("after a hole"));
  EXPECT_THAT(error_of(file_bytes("{" + tensor("a", "F32", "[2]", "[1,9]") + "}", data8 + "9")), HasSubstr("hole"));
  EXPECT_THAT(error_of(file_bytes(R"({"__metadata__":3})")), HasSubstr("not an object"));
  EXPECT_THAT(error_of(file_bytes(R"({"__metadata__":{"k":3}})")), HasSubstr("'k' is not a string"));
  EXPECT_THAT(error_of(file_bytes(R"({"__metadata__":{"xxh3_64":"0000000000000000"},)" + good + "}", data8)),
              HasSubstr("corrupt"));
}

TEST_F(Safetensors, WritingRefusesWhatCannotBeRead) {
  const Tensor tensor = Tensor::zeros(Shape({2, 3}), DType::f32);
  const std::string path = folder_ / "x";
  EXPECT_THROW(write_safetensors(path, {{"a", tensor}, {"a", tensor}}), Error);
  EXPECT_THROW(write_safetensors(path, {{"a", tensor->transpose(0, 1)}}), Error);
  EXPECT_THROW(write_safetensors(folder_ / "missing/x", {{"a", tensor}}), Error);
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path())) << "nothing half-written";
}

// Any damage to a small file: an Error or a valid file, never a crash or an access outside (sanitizers see it).
TEST_F(Safetensors, DamagedFilesNeverCrash) {
  const Tensor a = testing::random_normal(Shape({3, 4}), DType::f32, 1);
  const Tensor b = testing::random_normal(Shape({5}), DType::bf16, 2);
  const std::string path = folder_ / "whole";
  write_safetensors(path, {{"model.a", a}, {"model.b", b}});
  const std::string whole = testing::read_bytes(path);
  ASSERT_EQ(error_of(whole), "");
  for (std::size_t length = 0; length < whole.size(); ++length) {
    EXPECT_NE(error_of(whole.substr(0, length)), "") << length;
    EXPECT_NE(error_of(whole + whole.substr(0, length + 1)), "") << length;
  }
  constexpr int kVariants = 5000;
  int refused = 0;
  for (int variant = 0; variant < kVariants; ++variant) {
    const auto random = [&](int i) {
      return testing::uniform(static_cast<std::uint64_t>(variant), static_cast<std::uint64_t>(i));
    };
    std::string damaged = whole;
    for (int change = 0; change <= variant % 4; ++change) {
      const auto at = static_cast<std::size_t>(random(4 * change) * static_cast<double>(damaged.size()));
      const double kind = random(4 * change + 1);
      if (kind < 0.5) {
        damaged[at] = static_cast<char>(damaged[at] ^ (1 << static_cast<int>(random(4 * change + 2) * 8.0)));
      } else if (kind < 0.7) {
        damaged[at] = "0123456789[]{},:\"-e."[static_cast<std::size_t>(random(4 * change + 2) * 20.0)];
      } else if (kind < 0.85) {
        damaged.erase(at, 1 + static_cast<std::size_t>(random(4 * change + 2) * 16.0));
      } else {
        const auto from = static_cast<std::size_t>(random(4 * change + 2) * static_cast<double>(damaged.size()));
        damaged.insert(at, damaged.substr(from, 16));
      }
      if (damaged.empty()) damaged = "x";
    }
    if (!error_of(damaged).empty()) ++refused;
  }
  EXPECT_GT(refused, kVariants * 9 / 10);
}

}  // namespace
}  // namespace flashgla::model
