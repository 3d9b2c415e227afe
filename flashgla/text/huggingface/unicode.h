// Code points and their properties (Unicode 15, by utf8proc), with the meanings that Rust's `char` gives them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace flashgla::text::huggingface {

using CodePoint = std::int32_t;

struct Character {
  CodePoint code;
  std::size_t length;  // in bytes
};

// The first character of valid UTF-8 that is not empty, and the last.
Character character_at(std::string_view text, std::size_t at);
Character last_character(std::string_view text);
void append(std::string& text, CodePoint code);

bool is_whitespace(CodePoint code);   // White_Space
bool is_numeric(CodePoint code);      // N*
bool is_punctuation(CodePoint code);  // P*, or ASCII punctuation and symbols
bool is_mark(CodePoint code);         // M*
bool is_word(CodePoint code);         // \w of Rust's regex: Alphabetic, M*, Nd, Pc, Join_Control
void append_lower(std::string& text, CodePoint code);

enum class Form { nfc, nfd, nfkc, nfkd };
// Normalised text; valid UTF-8 in, valid UTF-8 out. ASCII is passed by.
std::string normalized(std::string_view text, Form form);

// Bytes of the first extended grapheme cluster of a text that is not empty.
std::size_t first_grapheme(std::string_view text);

// The text with U+FFFD for what is not UTF-8 (one for each longest beginning of a character); `storage` holds it when
// it is not the text itself.
std::string_view valid_utf8(std::string_view text, std::string& storage);

// The characters that GPT-2's byte level BPE writes bytes as, and back (-1: none of them).
CodePoint character_of_byte(unsigned char byte);
int byte_of_character(CodePoint code);
void append_byte_characters(std::string& out, std::string_view bytes);

}  // namespace flashgla::text::huggingface
