#include "flashgla/text/utf8.h"

namespace flashgla::text {

Utf8Character first_character(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return {Utf8::valid, 1};
  if (lead < 0xC2 || lead > 0xF4) return {Utf8::invalid, 1};
  const std::size_t length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  // Ranges of the second byte that shut out overlong forms, surrogates and what lies past U+10FFFF.
  unsigned char low = 0x80, high = 0xBF;
  if (lead == 0xE0) low = 0xA0;
  if (lead == 0xED) high = 0x9F;
  if (lead == 0xF0) low = 0x90;
  if (lead == 0xF4) high = 0x8F;
  for (std::size_t i = 1; i < length; ++i) {
    if (i == text.size()) return {Utf8::truncated, i};
    if (byte(i) < low || byte(i) > high) return {Utf8::invalid, i};
    low = 0x80, high = 0xBF;
  }
  return {Utf8::valid, length};
}

}  // namespace flashgla::text
