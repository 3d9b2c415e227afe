// The ids of words seen lately: a table of one place a hash, each a cache line.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

#include "flashgla/text/tokenizer.h"

namespace flashgla::text::huggingface {

class WordCache {
 public:
  static constexpr std::size_t kPlaces = std::size_t{1} << 15;  // 2 MiB
  static constexpr std::size_t kLongestWord = 30, kMostIds = 6;

  WordCache() : places_(kPlaces) {}

  static std::uint64_t hash_of(std::string_view word);

  // Appends the word's ids; false: it is not known.
  bool find(std::string_view word, std::uint64_t hash, TokenIds& ids) const {
    const Place& place = places_[hash % kPlaces];
    if (place.hash != hash || place.bytes != word.size() || std::memcmp(place.word, word.data(), word.size()) != 0) {
      return false;
    }
    ids.insert(ids.end(), place.ids, place.ids + place.count);
    return true;
  }

  // Takes the place of another word with the same hash. Words and ids past the limits are passed over.
  void remember(std::string_view word, std::uint64_t hash, const std::int32_t* ids, std::size_t count) {
    if (word.size() > kLongestWord || count > kMostIds) return;
    Place& place = places_[hash % kPlaces];
    place.hash = hash;
    place.bytes = static_cast<std::uint8_t>(word.size());
    place.count = static_cast<std::uint8_t>(count);
    std::memcpy(place.word, word.data(), word.size());
    std::copy_n(ids, count, place.ids);  // none: a word may have no ids
  }

 private:
  struct alignas(64) Place {
    std::uint64_t hash = 0;
    std::uint8_t bytes = 0, count = 0;  // words are not empty, so 0 bytes match none
    char word[kLongestWord];
    std::int32_t ids[kMostIds];
  };
  static_assert(sizeof(Place) == 64);
  std::vector<Place> places_;
};

}  // namespace flashgla::text::huggingface
