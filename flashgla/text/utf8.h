// Where UTF-8 characters begin and end (Unicode 15, table 3-7).
#pragma once

#include <cstddef>
#include <string_view>

namespace flashgla::text {

enum class Utf8 { valid, truncated, invalid };

struct Utf8Character {
  Utf8 status;
  // valid: bytes of the character; truncated: the bytes there are, which more bytes could complete; invalid: bytes that
  // stand for one replacement character (the longest beginning of a character, at least one).
  std::size_t length;
};

// The first character of a text that is not empty.
Utf8Character first_character(std::string_view text);

constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";  // U+FFFD

}  // namespace flashgla::text
