// Unigram: of all ways to cut a piece into tokens the one with the largest sum of scores (Viterbi).
#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "flashgla/base/error.h"
#include "flashgla/text/huggingface/model.h"
#include "flashgla/text/huggingface/unicode.h"

namespace flashgla::text::huggingface {
namespace {

constexpr double kUnknownPenalty = 10.0;
constexpr std::size_t kLongestToken = 4096;  // the trie is as deep

// Tokens by their bytes: node 0 is the root; the children of a node lie side by side, in order of their bytes.
class Trie {
 public:
  struct Entry {
    std::string token;
    std::int32_t id;
  };

  // Of equal tokens the last counts.
  explicit Trie(std::vector<Entry> entries) {
    std::stable_sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.token < b.token; });
    nodes_.push_back({});
    build(entries, 0, entries.size(), 0, 0);
  }

  // Calls found(length, id) for every token that the text begins with, the shortest first.
  template <class Found>
  void prefixes(std::string_view text, Found&& found) const {
    std::size_t node = 0;
    for (std::size_t i = 0; i < text.size(); ++i) {
      const Node& here = nodes_[node];
      const auto begin = nodes_.begin() + here.children, end = begin + here.count;
      const auto byte = static_cast<unsigned char>(text[i]);
      const auto child =
          std::lower_bound(begin, end, byte, [](const Node& a, unsigned char wanted) { return a.byte < wanted; });
      if (child == end || child->byte != byte) return;
      node = static_cast<std::size_t>(child - nodes_.begin());
      if (child->id >= 0) found(i + 1, child->id);
    }
  }

 private:
  struct Node {
    std::int32_t children = 0;  // index of the first
    std::int32_t id = -1;
    std::uint16_t count = 0;
    unsigned char byte = 0;
  };

  // Entries [begin, end) share their first `depth` bytes, which lead to `node`.
  void build(const std::vector<Entry>& entries, std::size_t begin, std::size_t end, std::size_t depth,
             std::size_t node) {
    while (begin < end && entries[begin].token.size() == depth) nodes_[node].id = entries[begin++].id;
    struct Group {
      std::size_t begin, end;
    };
    std::vector<Group> groups;
    for (std::size_t i = begin; i < end;) {
      std::size_t last = i;
      while (last < end && entries[last].token[depth] == entries[i].token[depth]) ++last;
      groups.push_back({i, last});
      i = last;
    }
    const std::size_t first = nodes_.size();
    nodes_[node].children = static_cast<std::int32_t>(first);
    nodes_[node].count = static_cast<std::uint16_t>(groups.size());
    for (const Group& group : groups) {
      nodes_.push_back({});
      nodes_.back().byte = static_cast<unsigned char>(entries[group.begin].token[depth]);
    }
    for (std::size_t i = 0; i < groups.size(); ++i) {
      build(entries, groups[i].begin, groups[i].end, depth + 1, first + i);
    }
  }

  std::vector<Node> nodes_;
};

class Unigram final : public Model {
 public:
  explicit Unigram(const Part& part) : trie_(read(part)) {
    for (std::size_t i = 0; i < tokens_.size(); ++i) ids_[tokens_[i]] = static_cast<std::int32_t>(i);
    if (part.has("unk_id")) {
      const std::int64_t unknown = part.integer("unk_id");
      if (unknown < 0 || unknown >= size()) part.refuse("unk_id is not in the vocabulary");
      unknown_ = static_cast<std::int32_t>(unknown);
    }
    byte_ids_.fill(-1);
    if (part.flag("byte_fallback", false)) {
      for (int byte = 0; byte < 256; ++byte) {
        constexpr const char* kDigits = "0123456789ABCDEF";
        const std::string token = std::string("<0x") + kDigits[byte / 16] + kDigits[byte % 16] + ">";
        byte_ids_[static_cast<std::size_t>(byte)] = find(token);
      }
    }
  }

  std::int64_t vocabulary() const override { return size(); }
  std::int32_t find(const std::string& token) const override {
    const auto found = ids_.find(token);
    return found == ids_.end() ? -1 : found->second;
  }

  void encode(std::string_view piece, ModelMemory& memory, TokenIds& ids) const override {
    auto& best = memory.best;
    best.assign(piece.size() + 1, {0.0, -1, -1});
    const auto reach = [&](std::size_t end, double score, std::size_t begin, std::int32_t id) {
      ModelMemory::Best& target = best[end];
      if (target.begin < 0 || score > target.score) target = {score, static_cast<std::int64_t>(begin), id};
    };
    for (std::size_t at = 0; at < piece.size();) {
      const double score = best[at].score;
      const std::size_t length = character_at(piece, at).length;
      bool alone = false;  // the character is a token
      trie_.prefixes(piece.substr(at), [&](std::size_t size, std::int32_t id) {
        reach(at + size, score + scores_[static_cast<std::size_t>(id)], at, id);
        alone = alone || size == length;
      });
      if (!alone) reach(at + length, score + unknown_score_, at, unknown_);
      at += length;
    }
    memory.path.clear();
    for (auto end = static_cast<std::int64_t>(piece.size()); end > 0;) {
      memory.path.push_back({0.0, best[static_cast<std::size_t>(end)].begin, best[static_cast<std::size_t>(end)].id});
      end = memory.path.back().begin;
    }
    // Neighbouring unknown characters are one.
    for (std::size_t i = memory.path.size(); i-- > 0;) {
      const auto begin = static_cast<std::size_t>(memory.path[i].begin);
      if (memory.path[i].id != unknown_) {
        ids.push_back(memory.path[i].id);
        continue;
      }
      while (i > 0 && memory.path[i - 1].id == unknown_) --i;
      const std::size_t end = i > 0 ? static_cast<std::size_t>(memory.path[i - 1].begin) : piece.size();
      add_unknown(piece.substr(begin, end - begin), memory, ids);
    }
  }

 private:
  std::vector<Trie::Entry> read(const Part& part) {
    const Part vocabulary = part.at("vocab");
    if (!vocabulary.is_array() || vocabulary.json().empty()) vocabulary.refuse("expected a list of tokens and scores");
    std::vector<Trie::Entry> entries;
    double smallest = std::numeric_limits<double>::infinity();
    for (const nlohmann::json& pair : vocabulary.json()) {
      if (!pair.is_array() || pair.size() != 2 || !pair[0].is_string() || !pair[1].is_number()) {
        vocabulary.refuse("entry " + std::to_string(entries.size()) + " is not a token and a score");
      }
      entries.push_back({pair[0].get<std::string>(), static_cast<std::int32_t>(entries.size())});
      if (entries.back().token.size() > kLongestToken) {
        vocabulary.refuse("entry " + std::to_string(entries.size() - 1) + " has more than " +
                          std::to_string(kLongestToken) + " bytes");
      }
      tokens_.push_back(entries.back().token);
      scores_.push_back(pair[1].get<double>());
      smallest = std::min(smallest, scores_.back());
    }
    unknown_score_ = smallest - kUnknownPenalty;
    return entries;
  }

  void add_unknown(std::string_view text, ModelMemory& memory, TokenIds& ids) const {
    memory.text.assign(text);
    if (const std::int32_t id = find(memory.text); id >= 0) {  // a text that spells the unknown token itself
      ids.push_back(id);
      return;
    }
    if (std::all_of(text.begin(), text.end(), [&](char c) { return byte_ids_[static_cast<unsigned char>(c)] >= 0; })) {
      for (const char c : text) ids.push_back(byte_ids_[static_cast<unsigned char>(c)]);
      return;
    }
    if (unknown_ < 0) throw Error("tokenizer: the text has a character that is no token, and there is no unk_id");
    ids.push_back(unknown_);
  }

  std::vector<double> scores_;
  double unknown_score_ = 0.0;
  Trie trie_;
  std::unordered_map<std::string, std::int32_t> ids_;
  std::int32_t unknown_ = -1;
  std::array<std::int32_t, 256> byte_ids_{};
};

}  // namespace

std::unique_ptr<Model> read_unigram(const Part& part) { return std::make_unique<Unigram>(part); }

}  // namespace flashgla::text::huggingface
