// Decoders: the text that each token stands for.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "flashgla/text/huggingface/part.h"
#include "flashgla/text/huggingface/regex.h"

namespace flashgla::text::huggingface {

class Decoder {
 public:
  Decoder() = default;  // none: tokens with a space between them
  // Throws Error naming what is not supported: decoders whose text of a token depends on the tokens around it, except
  // for what they take off the beginning of the text.
  explicit Decoder(const Part& part);

  // The bytes of one token, of which nothing precedes the first.
  std::string text_of(std::string token, bool first) const;

 private:
  struct Step {
    enum class Kind { byte_level, byte_fallback, replace_text, replace_pattern, strip, metaspace, drop_first } kind;
    std::string what, by;
    std::optional<Regex> regex;
    std::int64_t start = 0, stop = 0;  // strip: most characters taken at either end
    bool drops = false;                // metaspace: no space at the beginning of a text
  };
  void read(const Part& part, bool& fused);
  static bool apply(const Step& step, std::string& token, bool first);  // false: the token is bytes, and done

  std::vector<Step> steps_;
  bool spaces_between_ = true;
};

}  // namespace flashgla::text::huggingface
