// What is evaluated: documents, continuations of contexts, and choices, from text, token files and JSON lines.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "flashgla/eval/scorer.h"
#include "flashgla/text/tokenizer.h"

namespace flashgla::eval {

// Tokens of which the first is given and all others are predicted.
struct Document {
  text::TokenIds tokens;
  std::int64_t bytes = 0, words = 0;  // of its text; words are what whitespace separates; 0: not known
};

// The token that stands before a text without context: bos, or eos where there is none. Throws Error naming the
// tokenizer when it has neither.
std::int32_t prefix_token(const text::Tokenizer& tokenizer);

Document document_of(const text::Tokenizer& tokenizer, std::string_view text);
std::int64_t count_words(std::string_view text);

// Tokens of a context and its continuation, as lm-evaluation-harness 0.4.13 makes them: spaces at the context's end go
// to the continuation; both are encoded together, and what follows the context's own tokens is the continuation; bos
// goes before them where the tokenizer adds it; without a context the prefix token is one. Of a context too long for
// `longest` tokens (context and continuation without its last token; 0: any) the end is kept. Throws Error when the
// continuation has no tokens or is longer than that.
Request encode_pair(const text::Tokenizer& tokenizer, std::string_view context, std::string_view continuation,
                    std::int64_t longest);

// One line of a task file: {"context": ..., "continuation": ...}, the continuation beginning with the space that there
// is; or {"context": ..., "choices": [...], "answer": i}, with "delimiter" (a space, where it is not given) between the
// two.
struct Example {
  std::string context;
  std::vector<std::string> choices;  // one: a continuation
  std::string delimiter;
  std::optional<std::int64_t> answer;  // of several choices: the right one
  std::string name;                    // its file and line, in messages
};

enum class DataKind : std::uint8_t { text, tokens, documents, examples };

// By its name and first line: a folder made by `data prepare` or a .bin file holds tokens; JSON lines hold documents
// ("text") or examples; anything else is one text. Throws Error naming what is missing in the first line.
DataKind kind_of(const std::string& path);

// Throws Error naming file, line and field.
std::vector<Example> read_examples(const std::string& path);
std::vector<std::string> read_documents(const std::string& path, const std::string& text_field);

// Whether the right choice wins by each measure, as the harness decides: the largest log-likelihood, the largest by
// character of the choice (without the delimiter), and by byte.
struct Verdict {
  bool acc = false, acc_norm = false, acc_bytes = false;
};
Verdict judge(const Example& example, std::span<const Score> scores);

}  // namespace flashgla::eval
