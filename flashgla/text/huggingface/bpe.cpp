// Byte pair encoding: the symbols of a piece are merged, always the pair of the lowest rank, of equals the leftmost.
#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "flashgla/text/huggingface/model.h"
#include "flashgla/text/huggingface/unicode.h"

namespace flashgla::text::huggingface {
namespace {

constexpr std::string_view kSpaceSign = "\u2581";
// Ids stay below 2^31 / 2, and so do the counts of merges.
constexpr std::int64_t kLargestId = 1 << 30;

// Pairs of ids to what their merge makes, by open addressing.
class MergeTable {
 public:
  struct Entry {
    std::uint64_t key = kNone;
    std::uint32_t rank = 0;
    std::int32_t id = 0;
  };

  void reserve(std::size_t count) {
    std::size_t size = 16;
    while (size < count * 2) size *= 2;
    entries_.assign(size, {});
  }
  // A later pair replaces an earlier one.
  void set(std::int32_t left, std::int32_t right, std::uint32_t rank, std::int32_t id) {
    Entry& entry = entries_[slot(key_of(left, right))];
    entry = {key_of(left, right), rank, id};
  }
  const Entry* find(std::int32_t left, std::int32_t right) const {
    const Entry& entry = entries_[slot(key_of(left, right))];
    return entry.key == kNone ? nullptr : &entry;
  }

 private:
  static constexpr std::uint64_t kNone = ~std::uint64_t{0};
  static std::uint64_t key_of(std::int32_t left, std::int32_t right) {
    return static_cast<std::uint64_t>(left) << 32 | static_cast<std::uint32_t>(right);
  }
  std::size_t slot(std::uint64_t key) const {
    const std::size_t mask = entries_.size() - 1;
    std::size_t at = static_cast<std::size_t>((key * 0x9E3779B97F4A7C15u) >> 20) & mask;
    while (entries_[at].key != key && entries_[at].key != kNone) at = (at + 1) & mask;
    return at;
  }
  std::vector<Entry> entries_;
};

struct Hash {
  using is_transparent = void;
  std::size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};
using Vocabulary = std::unordered_map<std::string, std::int32_t, Hash, std::equal_to<>>;

// The bytes that byte level characters stand for; false when one stands for none.
bool bytes_of(std::string_view token, std::string& out) {
  out.clear();
  for (std::size_t i = 0; i < token.size();) {
    const Character character = character_at(token, i);
    const int byte = byte_of_character(character.code);
    if (byte < 0) return false;
    out += static_cast<char>(byte);
    i += character.length;
  }
  return true;
}

class Bpe final : public Model {
 public:
  Bpe(const Part& part, bool raw_bytes) : raw_bytes_(raw_bytes) {
    if (part.has("dropout") && part.at("dropout").json().is_number() && part.at("dropout").json() != 0.0) {
      part.refuse("dropout is not supported: encoding would be random");
    }
    prefix_ = part.text("continuing_subword_prefix", "");
    suffix_ = part.text("end_of_word_suffix", "");
    fuse_unknown_ = part.flag("fuse_unk", false);
    ignore_merges_ = part.flag("ignore_merges", false);
    read_vocabulary(part.at("vocab"));
    read_merges(part.at("merges"));
    if (const auto unknown = part.optional_text("unk_token")) {
      unknown_ = find(*unknown);
      if (unknown_ < 0) part.refuse("unk_token " + *unknown + " is not in the vocabulary");
    }
    byte_ids_.fill(-1);
    if (part.flag("byte_fallback", false)) {
      for (int byte = 0; byte < 256; ++byte) {
        constexpr const char* kDigits = "0123456789ABCDEF";
        const std::string token = std::string("<0x") + kDigits[byte / 16] + kDigits[byte % 16] + ">";
        byte_ids_[static_cast<std::size_t>(byte)] = find(token);
      }
    }
    if (raw_bytes_) prepare_bytes();
    const auto sign = vocabulary_.find(kSpaceSign);
    cuts_ = !raw_bytes_ && sign != vocabulary_.end() && prefix_.empty() && suffix_.empty() && !ignore_merges_ &&
            !merge_crosses_words_;
  }

  std::int64_t vocabulary() const override { return static_cast<std::int64_t>(vocabulary_.size()); }
  std::int32_t find(const std::string& token) const override {
    const auto found = vocabulary_.find(token);
    return found == vocabulary_.end() ? -1 : found->second;
  }
  std::string_view cut_before() const override { return cuts_ ? kSpaceSign : std::string_view(); }

  void encode(std::string_view piece, ModelMemory& memory, TokenIds& ids) const override {
    if (ignore_merges_) {
      const Vocabulary& whole = raw_bytes_ ? raw_vocabulary_ : vocabulary_;
      if (const auto found = whole.find(piece); found != whole.end()) {
        ids.push_back(found->second);
        return;
      }
    }
    memory.symbols.clear();
    if (raw_bytes_) {
      add_bytes(piece, memory);
    } else {
      add_characters(piece, memory);
    }
    merge(memory);
    for (const ModelMemory::Symbol& symbol : memory.symbols) {
      if (symbol.alive) ids.push_back(symbol.id);
    }
  }

 private:
  void read_vocabulary(const Part& part) {
    if (!part.is_object()) part.refuse("expected an object of tokens and ids");
    std::int64_t largest = -1;
    for (const auto& [token, id] : part.json().items()) {
      if (!id.is_number_integer() || id.get<std::int64_t>() < 0 || id.get<std::int64_t>() >= kLargestId) {
        part.refuse("the id of \"" + token + "\" is not a number from 0 to 2^30");
      }
      vocabulary_.emplace(token, id.get<std::int32_t>());
      largest = std::max(largest, id.get<std::int64_t>());
    }
    if (vocabulary_.empty()) part.refuse("it is empty");
    if (largest >= 2 * vocabulary() + 1024) part.refuse("most ids up to " + std::to_string(largest) + " are not used");
    tokens_.resize(static_cast<std::size_t>(largest + 1));
    for (const auto& [token, id] : vocabulary_) tokens_[static_cast<std::size_t>(id)] = token;
  }

  void read_merges(const Part& part) {
    if (!part.is_array()) part.refuse("expected a list of merges");
    const nlohmann::json& merges = part.json();
    merges_.reserve(merges.size());
    std::uint32_t rank = 0;
    for (const nlohmann::json& merge : merges) {
      std::string left, right;
      if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
        left = merge[0].get<std::string>();
        right = merge[1].get<std::string>();
      } else if (merge.is_string()) {
        const std::string both = merge.get<std::string>();
        const std::size_t space = both.find(' ');
        if (space == std::string::npos || both.find(' ', space + 1) != std::string::npos) {
          part.refuse("merge " + std::to_string(rank) + " is not two tokens");
        }
        left = both.substr(0, space);
        right = both.substr(space + 1);
      } else {
        part.refuse("merge " + std::to_string(rank) + " is not two tokens");
      }
      const std::size_t cut = std::min(prefix_.size(), right.size());
      const std::string whole = left + right.substr(cut);
      const std::int32_t left_id = find(left), right_id = find(right), id = find(whole);
      for (const auto& [token, found] : {std::pair(left, left_id), {right, right_id}, {whole, id}}) {
        if (found < 0) part.refuse("merge " + std::to_string(rank) + " needs \"" + token + "\", which is no token");
      }
      merges_.set(left_id, right_id, rank++, id);
      for (std::size_t at = whole.find(kSpaceSign, 1); at != std::string::npos; at = whole.find(kSpaceSign, at + 1)) {
        merge_crosses_words_ = merge_crosses_words_ || at < kSpaceSign.size() ||
                               whole.substr(at - kSpaceSign.size(), kSpaceSign.size()) != kSpaceSign;
      }
    }
  }

  // Symbols of single bytes, by place in the piece, and whole pieces for ignore_merges.
  void prepare_bytes() {
    for (std::size_t place = 0; place < byte_symbols_.size(); ++place) {
      for (int byte = 0; byte < 256; ++byte) {
        std::string token = (place & 1) != 0 ? prefix_ : "";
        append(token, character_of_byte(static_cast<unsigned char>(byte)));
        if ((place & 2) != 0) token += suffix_;
        byte_symbols_[place][static_cast<std::size_t>(byte)] = find(token);
      }
    }
    if (!ignore_merges_) return;
    std::string raw;
    for (const auto& [token, id] : vocabulary_) {
      if (bytes_of(token, raw)) raw_vocabulary_.emplace(raw, id);
    }
  }

  void add(ModelMemory& memory, std::int32_t id) const {
    const auto position = static_cast<std::int32_t>(memory.symbols.size());
    memory.symbols.push_back({id, position - 1, position + 1, true});
  }

  // What becomes of characters that are not in the vocabulary: one unknown token for each, or for a run of them.
  struct Unknown {
    bool pending = false;
  };
  void add_unknown(ModelMemory& memory, Unknown& unknown) const {
    if (unknown_ < 0) return;  // they vanish
    if (unknown.pending && !fuse_unknown_) add(memory, unknown_);
    unknown.pending = true;
  }
  void add_known(ModelMemory& memory, Unknown& unknown, std::int32_t id) const {
    if (unknown.pending) add(memory, unknown_);
    unknown.pending = false;
    add(memory, id);
  }

  void add_bytes(std::string_view piece, ModelMemory& memory) const {
    Unknown unknown;
    for (std::size_t i = 0; i < piece.size(); ++i) {
      const std::size_t place = (i > 0 ? 1u : 0u) | (i + 1 == piece.size() ? 2u : 0u);
      const std::int32_t id = byte_symbols_[place][static_cast<unsigned char>(piece[i])];
      if (id >= 0) {
        add_known(memory, unknown, id);
      } else if (std::string token; !fall_back(byte_token(piece[i], place, token), memory)) {
        add_unknown(memory, unknown);
      }
    }
    if (unknown.pending) add(memory, unknown_);
  }

  const std::string& byte_token(char byte, std::size_t place, std::string& token) const {
    if ((place & 1) != 0) token += prefix_;
    append(token, character_of_byte(static_cast<unsigned char>(byte)));
    if ((place & 2) != 0) token += suffix_;
    return token;
  }

  void add_characters(std::string_view piece, ModelMemory& memory) const {
    Unknown unknown;
    const bool decorated = !prefix_.empty() || !suffix_.empty();
    for (std::size_t i = 0; i < piece.size();) {
      const std::size_t length = character_at(piece, i).length;
      std::string_view token = piece.substr(i, length);
      if (decorated) {
        memory.text.assign(i > 0 ? prefix_ : std::string());
        memory.text += token;
        if (i + length == piece.size()) memory.text += suffix_;
        token = memory.text;
      }
      i += length;
      if (const auto found = vocabulary_.find(token); found != vocabulary_.end()) {
        add_known(memory, unknown, found->second);
      } else if (!fall_back(token, memory)) {
        add_unknown(memory, unknown);
      }
    }
    if (unknown.pending) add(memory, unknown_);
  }

  // The token as its bytes; false when there are no tokens for all of them. A pending unknown token stays pending, as
  // in the library.
  bool fall_back(std::string_view token, ModelMemory& memory) const {
    for (const char byte : token) {
      if (byte_ids_[static_cast<unsigned char>(byte)] < 0) return false;
    }
    for (const char byte : token) add(memory, byte_ids_[static_cast<unsigned char>(byte)]);
    return true;
  }

  // Of the heap's top: the lowest rank, then the leftmost.
  static bool comes_later(const ModelMemory::Merge& a, const ModelMemory::Merge& b) {
    return a.rank != b.rank ? a.rank > b.rank : a.position > b.position;
  }

  void merge(ModelMemory& memory) const {
    auto& symbols = memory.symbols;
    auto& heap = memory.merges;
    heap.clear();
    if (symbols.empty()) return;
    symbols.back().next = -1;
    for (std::size_t i = 0; i + 1 < symbols.size(); ++i) {
      if (const auto* found = merges_.find(symbols[i].id, symbols[i + 1].id)) {
        heap.push_back({found->rank, static_cast<std::int32_t>(i), found->id});
      }
    }
    std::make_heap(heap.begin(), heap.end(), comes_later);
    const auto push = [&](std::int32_t position, std::int32_t left, std::int32_t right) {
      if (const auto* found = merges_.find(left, right)) {
        heap.push_back({found->rank, position, found->id});
        std::push_heap(heap.begin(), heap.end(), comes_later);
      }
    };
    while (!heap.empty()) {
      const ModelMemory::Merge top = heap.front();
      std::pop_heap(heap.begin(), heap.end(), comes_later);
      heap.pop_back();
      ModelMemory::Symbol& left = symbols[static_cast<std::size_t>(top.position)];
      if (!left.alive || left.next < 0) continue;
      ModelMemory::Symbol& right = symbols[static_cast<std::size_t>(left.next)];
      const auto* now = merges_.find(left.id, right.id);
      if (now == nullptr || now->id != top.id) continue;  // the pair is another by now
      left.id = top.id;
      left.next = right.next;
      right.alive = false;
      if (right.next >= 0) symbols[static_cast<std::size_t>(right.next)].previous = top.position;
      if (left.previous >= 0) {
        push(left.previous, symbols[static_cast<std::size_t>(left.previous)].id, left.id);
      }
      if (left.next >= 0) push(top.position, left.id, symbols[static_cast<std::size_t>(left.next)].id);
    }
  }

  bool raw_bytes_;
  std::string prefix_, suffix_;
  bool fuse_unknown_ = false, ignore_merges_ = false;
  Vocabulary vocabulary_;      // tokens as in the file
  Vocabulary raw_vocabulary_;  // by the bytes that they stand for (raw_bytes_ and ignore_merges_)
  MergeTable merges_;
  bool merge_crosses_words_ = false, cuts_ = false;
  std::int32_t unknown_ = -1;
  std::array<std::int32_t, 256> byte_ids_{};                     // <0x..>
  std::array<std::array<std::int32_t, 256>, 4> byte_symbols_{};  // by place: 1: not the first, 2: the last
};

}  // namespace

std::unique_ptr<Model> read_bpe(const Part& part, bool raw_bytes) { return std::make_unique<Bpe>(part, raw_bytes); }

}  // namespace flashgla::text::huggingface
