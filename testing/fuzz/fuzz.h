// What the fuzz targets share. Each target feeds one reader with a file's bytes; whatever they are, the reader answers
// or throws flashgla::Error, soon, and with memory in proportion to the file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "flashgla/base/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace flashgla::fuzz {

// Ends the program, which libFuzzer reports with the input, when more memory is alive at once during this object's life
// than kFixed and kPerByte for each byte of the input.
class MemoryLimit {
 public:
  static constexpr std::size_t kFixed = std::size_t{4} << 20;  // readers' own buffers
  static constexpr std::size_t kPerByte = 100;                 // JSON: one or two bytes of text, 48 for the value
  explicit MemoryLimit(std::size_t input_bytes);
  ~MemoryLimit();
  MemoryLimit(const MemoryLimit&) = delete;
  MemoryLimit& operator=(const MemoryLimit&) = delete;
};

// The path of a file of this name that holds these bytes; in memory where the system has a folder for that.
std::string file_of(const std::string& name, std::span<const std::uint8_t> bytes);

// Ends the program: the reader contradicts itself.
void require(bool holds, const char* what);

// Calls read() under the limit; an Error is an answer.
template <class Read>
int attempt(std::size_t input_bytes, Read&& read) {
  const MemoryLimit limit(input_bytes);
  try {
    read();
  } catch (const Error&) {  // refused, as it should be
  }
  return 0;
}

}  // namespace flashgla::fuzz
