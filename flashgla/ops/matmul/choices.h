// Which of cuBLASLt's algorithms each product uses: what is kept in a cache and in run folders, so that a resume
// computes the same bits. Plain text without CUDA.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace flashgla::ops::matmul {

struct Choice {
  std::array<std::uint64_t, 8> algorithm{};  // opaque: valid for one version of the library and one device
  double microseconds = 0.0;                 // as timed; 0: the library's own first choice

  friend bool operator==(const Choice&, const Choice&) = default;
};

struct Choices {
  // The library's version and the device's name: algorithms of others mean nothing here.
  std::string made_by;
  // By product, as Key::text writes it.
  std::map<std::string, Choice> by_product;
};

// One line for each product, in the map's order, between a line that names the format and one with a checksum.
std::string to_text(const Choices& choices);
// Throws Error that says what is wrong with the text.
Choices choices_from_text(std::string_view text);

// Adds to a file of choices those that were timed and that it lacks; returns what it then holds. What is there stays,
// so that programs that time the same products at the same time end with the same choices. A damaged file is written
// anew. Throws Error when it cannot be written.
Choices add_to_file(const std::string& path, const Choices& choices);

}  // namespace flashgla::ops::matmul
