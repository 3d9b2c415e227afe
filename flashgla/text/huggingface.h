// Tokenizers that checkpoints on the Hugging Face hub ship: `tokenizer.json`, read natively.
#pragma once

#include <memory>
#include <string>

#include "flashgla/text/tokenizer.h"

namespace flashgla::text {

// From a tokenizer.json, with the tokenizer_config.json (or special_tokens_map.json) beside it, which says what begins
// and ends a text. Its ids are those of the `tokenizers` library: texts that spell an added token become that token,
// and bytes that are not UTF-8 become U+FFFD, as in text that Python decoded with errors="replace". Truncation and
// padding in the file are passed over: they are for batches, not for a corpus. Throws Error naming file, place and what
// is wrong or not supported.
std::unique_ptr<Tokenizer> load_huggingface(const std::string& file);

}  // namespace flashgla::text
