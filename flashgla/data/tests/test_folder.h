// A fresh folder for one test, removed after it.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <numeric>
#include <string>
#include <vector>

#include "flashgla/base/error.h"
#include "flashgla/data/token_file.h"

namespace flashgla::data {

class FolderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
    folder_ = std::filesystem::path(::testing::TempDir()) /
              ("flashgla_" + std::string(info->test_suite_name()) + info->name() + std::to_string(::getpid()));
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  // Documents of the given lengths whose tokens count from 0 over the whole file, so that every token is known again.
  TokenSpan counting_file(const std::vector<std::int64_t>& lengths, const std::string& name = "tokens") const {
    TokenFileWriter writer(path(name), 1 << 30);
    std::int32_t token = 0;
    for (const std::int64_t length : lengths) {
      std::vector<std::int32_t> ids(static_cast<std::size_t>(length));
      std::iota(ids.begin(), ids.end(), token);
      token += static_cast<std::int32_t>(length);
      writer.append(ids);
      writer.end_document();
    }
    writer.publish();
    return whole(TokenFile::open(path(name + ".bin")));
  }

  // The message of the Error that `call` throws; "no error" when it throws none.
  template <class Call>
  static std::string error_of(const Call& call) {
    try {
      call();
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  }

  std::filesystem::path folder_;
};

}  // namespace flashgla::data
