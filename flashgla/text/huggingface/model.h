// Models: pieces of text to ids.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "flashgla/text/huggingface/part.h"
#include "flashgla/text/tokenizer.h"

namespace flashgla::text::huggingface {

// What one thread encodes with; kept so that encoding allocates nothing.
struct ModelMemory {
  // BPE: the symbols of a piece as a linked list, and the merges that may come next.
  struct Symbol {
    std::int32_t id;
    std::int32_t previous, next;  // -1: none
    bool alive;
  };
  struct Merge {
    std::uint32_t rank;
    std::int32_t position;
    std::int32_t id;  // of what the merge makes
  };
  std::vector<Symbol> symbols;
  std::vector<Merge> merges;
  // Unigram: the best way to each byte of the piece.
  struct Best {
    double score;
    std::int64_t begin;  // of the last token; -1: not reached
    std::int32_t id;
  };
  std::vector<Best> best;
  std::vector<Best> path;
  std::string text;
};

class Model {
 public:
  virtual ~Model() = default;

  // Appends the ids of a piece that is not empty.
  virtual void encode(std::string_view piece, ModelMemory& memory, TokenIds& ids) const = 0;

  // A text before which every piece may be cut, where it does not follow itself, with the same ids; empty: none.
  virtual std::string_view cut_before() const { return {}; }

  std::int64_t size() const { return static_cast<std::int64_t>(tokens_.size()); }                    // largest id + 1
  const std::string& token(std::int32_t id) const { return tokens_[static_cast<std::size_t>(id)]; }  // as in the file
  virtual std::int64_t vocabulary() const = 0;                    // how many tokens there are
  virtual std::int32_t find(const std::string& token) const = 0;  // -1: not there

 protected:
  std::vector<std::string> tokens_;  // by id
};

// `raw_bytes`: pieces come as they are, and the model maps their bytes to characters by itself. Throws Error naming
// what is wrong or not supported.
std::unique_ptr<Model> read_bpe(const Part& part, bool raw_bytes);
std::unique_ptr<Model> read_unigram(const Part& part);

}  // namespace flashgla::text::huggingface
