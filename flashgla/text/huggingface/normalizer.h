// Normalizers: what is done to the text between the added tokens before it is cut.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "flashgla/text/huggingface/part.h"
#include "flashgla/text/huggingface/regex.h"

namespace flashgla::text::huggingface {

class Normalizer {
 public:
  virtual ~Normalizer() = default;
  // Changes a text of valid UTF-8. False when it took away the text's first character.
  virtual bool apply(std::string& text, MatchMemory& memory) const = 0;
};

// Appends what `part` asks for, a Sequence as its members. Throws Error naming a type that is not supported.
void read_normalizers(const Part& part, std::vector<std::unique_ptr<Normalizer>>& out);

}  // namespace flashgla::text::huggingface
