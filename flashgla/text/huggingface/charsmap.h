// SentencePiece's `precompiled_charsmap`: a double array trie of character sequences and what replaces them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace flashgla::text::huggingface {

class Charsmap {
 public:
  // Throws Error naming `place` when the base64 text is no such map.
  Charsmap(const std::string& base64, const std::string& place);

  // Grapheme clusters of fewer than six bytes are looked up whole, everything else by character; of the sequences in
  // the map that begin a chunk the shortest counts. So does the library.
  std::string apply(std::string_view text) const;

 private:
  std::optional<std::string_view> find(std::string_view chunk) const;

  std::vector<std::uint32_t> units_;
  std::string replacements_;  // each ends in a zero byte
};

}  // namespace flashgla::text::huggingface
