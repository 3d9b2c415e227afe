#include "flashgla/text/huggingface/charsmap.h"

#include "flashgla/base/error.h"
#include "flashgla/text/huggingface/unicode.h"
#include "flashgla/text/utf8.h"

namespace flashgla::text::huggingface {
namespace {

// False: it is not base64.
bool decode_base64(std::string_view text, std::string& out) {
  std::uint32_t bits = 0;
  int count = 0;
  while (text.ends_with('=')) text.remove_suffix(1);
  for (const char c : text) {
    std::uint32_t digit = 0;
    if (c >= 'A' && c <= 'Z') {
      digit = static_cast<std::uint32_t>(c - 'A');
    } else if (c >= 'a' && c <= 'z') {
      digit = static_cast<std::uint32_t>(c - 'a') + 26;
    } else if (c >= '0' && c <= '9') {
      digit = static_cast<std::uint32_t>(c - '0') + 52;
    } else if (c == '+' || c == '/') {
      digit = c == '+' ? 62 : 63;
    } else {
      return false;
    }
    bits = (bits << 6) | digit;
    count += 6;
    if (count >= 8) {
      count -= 8;
      out += static_cast<char>((bits >> count) & 0xFF);
    }
  }
  return true;
}

// A unit of the double array (Darts clone): label, offset to the children, whether a value ends here, or the value.
bool has_leaf(std::uint32_t unit) { return ((unit >> 8) & 1) != 0; }
std::uint32_t value_of(std::uint32_t unit) { return unit & 0x7FFFFFFFu; }
std::uint32_t label_of(std::uint32_t unit) { return unit & 0x800000FFu; }
std::uint32_t offset_of(std::uint32_t unit) { return (unit >> 10) << ((unit & (1u << 9)) >> 6); }

}  // namespace

Charsmap::Charsmap(const std::string& base64, const std::string& place) {
  std::string bytes;
  const auto word = [&](std::size_t at) {
    std::uint32_t value = 0;
    for (std::size_t i = 4; i-- > 0;) value = (value << 8) | static_cast<unsigned char>(bytes[at + i]);
    return value;
  };
  const bool decoded = decode_base64(base64, bytes) && bytes.size() >= 4;
  const std::size_t trie_bytes = decoded ? word(0) : 0;
  if (!decoded || trie_bytes % 4 != 0 || trie_bytes == 0 || trie_bytes > bytes.size() - 4) {
    throw Error(place + ": precompiled_charsmap is damaged");
  }
  for (std::size_t at = 4; at < 4 + trie_bytes; at += 4) units_.push_back(word(at));
  replacements_ = bytes.substr(4 + trie_bytes);
  std::string storage;
  if (valid_utf8(replacements_, storage).data() != replacements_.data()) {
    throw Error(place + ": precompiled_charsmap is damaged: its replacements are not UTF-8");
  }
}

std::optional<std::string_view> Charsmap::find(std::string_view chunk) const {
  std::size_t node = offset_of(units_[0]);
  for (const char c : chunk) {
    const auto label = static_cast<std::uint32_t>(static_cast<unsigned char>(c));
    if (label == 0) return std::nullopt;
    node ^= label;
    if (node >= units_.size() || label_of(units_[node]) != label) return std::nullopt;
    const std::uint32_t unit = units_[node];
    node ^= offset_of(unit);
    if (!has_leaf(unit)) continue;
    if (node >= units_.size()) return std::nullopt;
    const std::size_t begin = value_of(units_[node]);
    if (begin > replacements_.size()) return std::nullopt;
    const std::size_t end = replacements_.find('\0', begin);
    return std::string_view(replacements_).substr(begin, end == std::string::npos ? end : end - begin);
  }
  return std::nullopt;
}

std::string Charsmap::apply(std::string_view text) const {
  constexpr std::size_t kLongestWhole = 5;
  std::string out;
  out.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t size = first_grapheme(text.substr(at));
    const std::string_view grapheme = text.substr(at, size);
    at += size;
    if (size <= kLongestWhole) {
      if (const auto whole = find(grapheme)) {
        out += *whole;
        continue;
      }
    }
    for (std::size_t i = 0; i < size;) {
      const std::string_view character = grapheme.substr(i, character_at(grapheme, i).length);
      out += find(character).value_or(character);
      i += character.size();
    }
  }
  return out;
}

}  // namespace flashgla::text::huggingface
