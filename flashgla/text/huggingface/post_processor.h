// Post-processors: what goes before and after a text.
#pragma once

#include "flashgla/text/huggingface/part.h"
#include "flashgla/text/tokenizer.h"

namespace flashgla::text::huggingface {

struct Frame {
  TokenIds before, after;
  bool given = false;  // the file says what they are, if only that there are none
};

// Of a single text; pairs are not looked at. Throws Error naming a type that is not supported.
void read_post_processor(const Part& part, Frame& frame);

}  // namespace flashgla::text::huggingface
