#include "flashgla/text/huggingface/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>

#include "flashgla/base/error.h"
#include "flashgla/text/utf8.h"

namespace flashgla::text::huggingface {
namespace {

utf8proc_category_t category(CodePoint code) { return utf8proc_category(code); }

bool is_continuation(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) == 0x80; }

struct ByteTable {
  std::array<CodePoint, 256> characters;
  std::array<int, 512> bytes;

  ByteTable() {
    bytes.fill(-1);
    CodePoint next = 256;
    for (int byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
      characters[static_cast<std::size_t>(byte)] = printable ? byte : next++;
      bytes[static_cast<std::size_t>(characters[static_cast<std::size_t>(byte)])] = byte;
    }
  }
};

const ByteTable& byte_table() {
  static const ByteTable table;
  return table;
}

// U+11A7, which composes with nothing: utf8proc (its issue 317) takes it for a trailing consonant and drops it behind a
// syllable, so that it must begin a piece of its own.
constexpr std::string_view kNotTrailing = "\xE1\x86\xA7";

void append_normalized(std::string& out, std::string_view text, Form form) {
  int options = UTF8PROC_STABLE;
  options |= form == Form::nfc || form == Form::nfkc ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE;
  if (form == Form::nfkc || form == Form::nfkd) options |= UTF8PROC_COMPAT;
  utf8proc_uint8_t* result = nullptr;
  const utf8proc_ssize_t size =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()), static_cast<utf8proc_ssize_t>(text.size()),
                   &result, static_cast<utf8proc_option_t>(options));
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owned(result, &std::free);
  if (size < 0) throw Error(std::string("Unicode normalisation: ") + utf8proc_errmsg(size));
  out.append(reinterpret_cast<const char*>(result), static_cast<std::size_t>(size));
}

}  // namespace

Character character_at(std::string_view text, std::size_t at) {
  const auto byte = [&](std::size_t i) { return static_cast<CodePoint>(static_cast<unsigned char>(text[at + i])); };
  const CodePoint lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  if (lead < 0xE0) return {((lead & 0x1F) << 6) | (byte(1) & 0x3F), 2};
  if (lead < 0xF0) return {((lead & 0x0F) << 12) | ((byte(1) & 0x3F) << 6) | (byte(2) & 0x3F), 3};
  return {((lead & 0x07) << 18) | ((byte(1) & 0x3F) << 12) | ((byte(2) & 0x3F) << 6) | (byte(3) & 0x3F), 4};
}

Character last_character(std::string_view text) {
  std::size_t begin = text.size() - 1;
  while (begin > 0 && is_continuation(text[begin])) --begin;
  return character_at(text, begin);
}

void append(std::string& text, CodePoint code) {
  if (code < 0x80) {
    text += static_cast<char>(code);
    return;
  }
  utf8proc_uint8_t bytes[4];
  const utf8proc_ssize_t size = utf8proc_encode_char(code, bytes);
  text.append(reinterpret_cast<const char*>(bytes), static_cast<std::size_t>(size));
}

bool is_whitespace(CodePoint code) {
  if (code < 0x80) return code == ' ' || (code >= '\t' && code <= '\r');
  if (code == 0x85) return true;
  const utf8proc_category_t c = category(code);
  return c == UTF8PROC_CATEGORY_ZS || c == UTF8PROC_CATEGORY_ZL || c == UTF8PROC_CATEGORY_ZP;
}

bool is_numeric(CodePoint code) {
  if (code < 0x80) return code >= '0' && code <= '9';
  const utf8proc_category_t c = category(code);
  return c == UTF8PROC_CATEGORY_ND || c == UTF8PROC_CATEGORY_NL || c == UTF8PROC_CATEGORY_NO;
}

bool is_punctuation(CodePoint code) {
  if (code < 0x80) {
    return (code >= '!' && code <= '/') || (code >= ':' && code <= '@') || (code >= '[' && code <= '`') ||
           (code >= '{' && code <= '~');
  }
  const utf8proc_category_t c = category(code);
  return c >= UTF8PROC_CATEGORY_PC && c <= UTF8PROC_CATEGORY_PO;
}

bool is_mark(CodePoint code) {
  const utf8proc_category_t c = category(code);
  return c >= UTF8PROC_CATEGORY_MN && c <= UTF8PROC_CATEGORY_ME;
}

bool is_word(CodePoint code) {
  const utf8proc_category_t c = category(code);
  if (c >= UTF8PROC_CATEGORY_LU && c <= UTF8PROC_CATEGORY_NL) return true;  // L*, M*, Nd, Nl
  const auto within = [&](CodePoint low, CodePoint high) { return code >= low && code <= high; };
  return c == UTF8PROC_CATEGORY_PC || within(0x200C, 0x200D) ||
         // letters in circles and squares, which are symbols and Alphabetic
         within(0x24B6, 0x24E9) || within(0x1F130, 0x1F149) || within(0x1F150, 0x1F169) || within(0x1F170, 0x1F189);
}

void append_lower(std::string& text, CodePoint code) {
  if (code == 0x130) {  // the one character that becomes two
    text += "i\u0307";
  } else {
    append(text, code < 0x80 ? (code >= 'A' && code <= 'Z' ? code + 32 : code) : utf8proc_tolower(code));
  }
}

std::string normalized(std::string_view text, Form form) {
  std::string out;
  out.reserve(text.size());
  const auto ascii = [&](std::size_t i) { return static_cast<unsigned char>(text[i]) < 0x80; };
  // Between two ASCII characters nothing is composed or reordered, so the text may be cut there.
  for (std::size_t i = 0; i < text.size();) {
    std::size_t end = i;
    while (end < text.size() && ascii(end)) ++end;
    if (end == text.size()) {
      out += text.substr(i);
      break;
    }
    if (end > i) --end;  // what follows may combine with the last of them
    out += text.substr(i, end - i);
    i = end;
    if (ascii(end)) ++end;
    while (end < text.size() && !ascii(end)) ++end;
    while (i < end) {
      const std::size_t cut = std::min(text.substr(0, end).find(kNotTrailing, i + 1), end);
      append_normalized(out, text.substr(i, cut - i), form);
      i = cut;
    }
  }
  return out;
}

std::size_t first_grapheme(std::string_view text) {
  Character before = character_at(text, 0);
  std::size_t at = before.length;
  utf8proc_int32_t state = 0;
  while (at < text.size()) {
    const Character next = character_at(text, at);
    if (utf8proc_grapheme_break_stateful(before.code, next.code, &state)) break;
    at += next.length;
    before = next;
  }
  return at;
}

std::string_view valid_utf8(std::string_view text, std::string& storage) {
  std::size_t i = 0;
  const auto length_at = [&](std::size_t at, bool& valid) -> std::size_t {
    if (static_cast<unsigned char>(text[at]) < 0x80) return valid = true, 1;
    const Utf8Character character = first_character(text.substr(at));
    valid = character.status == Utf8::valid;
    return character.length;
  };
  bool valid = true;
  std::size_t length = 0;
  while (i < text.size() && (length = length_at(i, valid), valid)) i += length;
  if (i == text.size()) return text;
  storage.assign(text.substr(0, i));
  while (i < text.size()) {
    length = length_at(i, valid);
    storage += valid ? text.substr(i, length) : kReplacementCharacter;
    i += length;
  }
  return storage;
}

CodePoint character_of_byte(unsigned char byte) { return byte_table().characters[byte]; }

int byte_of_character(CodePoint code) {
  return code >= 0 && code < 512 ? byte_table().bytes[static_cast<std::size_t>(code)] : -1;
}

void append_byte_characters(std::string& out, std::string_view bytes) {
  for (const char byte : bytes) append(out, character_of_byte(static_cast<unsigned char>(byte)));
}

}  // namespace flashgla::text::huggingface
