// Pre-tokenizers: the text between added tokens, cut into the pieces that the model takes one by one.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "flashgla/text/huggingface/part.h"
#include "flashgla/text/huggingface/regex.h"

namespace flashgla::text::huggingface {

struct Piece {
  std::string_view text;  // never empty
  bool at_start = false;  // begins where the whole text begins
};

// What one thread cuts with.
struct CutMemory {
  MatchMemory match;
  std::vector<Span> spans;
  std::deque<std::string> storage;  // texts that were changed; pieces point into them
};

class PreTokenizer {
 public:
  virtual ~PreTokenizer() = default;
  virtual void apply(const Piece& piece, CutMemory& memory, std::vector<Piece>& out) const = 0;
  // Writes each byte of a piece as a character, and does nothing else.
  virtual bool maps_bytes() const { return false; }
};

// Appends what `part` asks for, a Sequence as its members. Throws Error naming a type that is not supported.
void read_pre_tokenizers(const Part& part, std::vector<std::unique_ptr<PreTokenizer>>& out);

}  // namespace flashgla::text::huggingface
