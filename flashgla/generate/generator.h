// Generator: prompts in chunk form, then one token at a time in recurrent form, with text streamed in whole characters.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "flashgla/base/context.h"
#include "flashgla/generate/session.h"
#include "flashgla/model/language_model.h"
#include "flashgla/ops/sampling/sampling.h"
#include "flashgla/text/tokenizer.h"

namespace flashgla::generate {

struct GenerateOptions {
  ops::sampling::Options sampling;
  std::int64_t max_tokens = 256;
  std::vector<std::string> stop;      // text at which a sequence ends; never given out
  bool stop_at_end = true;            // end at the tokenizer's eos
  std::function<bool()> should_stop;  // asked between tokens; absent: never
  // The session ends with the texts: a GPU may then be a token ahead of the host that looks whether one has ended, and
  // the session's state is nothing to go on from.
  bool ends_session = false;
};

enum class Finish : std::uint8_t { length, stop_string, end_of_text, interrupted };
const char* name_of(Finish finish);

// What became of one sequence.
struct Generation {
  std::int64_t tokens = 0;
  Finish finish = Finish::length;
};

class Generator {
 public:
  // All are the caller's and must outlive this. Throws Error when the tokenizer has more tokens than the model.
  Generator(Context& context, model::LanguageModel& model, const text::Tokenizer& tokenizer);

  // The tokens of a prompt: its text, after bos when it begins a sequence, the tokenizer adds one and the text does not
  // spell it. An empty text that begins a sequence is bos, or eos without one.
  text::TokenIds encode(std::string_view text, bool begins) const;

  // Takes the tokens in, at least one for each sequence, in pieces, so that the memory does not grow with the prompt.
  // Returns how many were taken in: fewer than there are where should_stop, asked between pieces, was true.
  std::int64_t feed(Session& session, const std::vector<text::TokenIds>& tokens,
                    const std::function<bool()>& should_stop = {}) const;

  // Goes on from where the sequences are. on_text(sequence, text) gets each sequence's text as it becomes whole. What
  // was generated is then part of the session (an eos is not), so that feed or generate can go on.
  std::vector<Generation> generate(Session& session, const GenerateOptions& options,
                                   const std::function<void(std::size_t, std::string_view)>& on_text) const;

 private:
  Context& context_;
  model::LanguageModel& model_;
  const text::Tokenizer& tokenizer_;
};

}  // namespace flashgla::generate
