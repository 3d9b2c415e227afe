// A document cut into windows, so that each token is predicted once, from at least one token before it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "flashgla/base/context.h"
#include "flashgla/model/language_model.h"
#include "flashgla/text/tokenizer.h"

namespace flashgla::eval {

// Tokens [begin, end) are read, and those of them that predict tokens [first, end] are counted (token `first` is
// predicted from first - 1, and so on): begin < first <= end.
struct Window {
  std::int64_t begin, first, end;
  friend bool operator==(const Window&, const Window&) = default;
};

// Of a document of `tokens` tokens, of which the first is given (a begin-of-text token, say) and all others are
// predicted, from windows of `length` tokens that advance by `stride` (at most length). With stride == length these are
// the windows of lm-evaluation-harness: one token of context, and in the last window as much as fits.
std::vector<Window> windows_of(std::int64_t tokens, std::int64_t length, std::int64_t stride);

// Sums of -log P (nats) of predicted tokens. Throws Error where one is NaN.
class LossReader {
 public:
  // Both are the caller's and must outlive this. A bf16 model on a device with matrix units computes in bf16.
  LossReader(Context& context, model::LanguageModel& model);

  // Loss of each counted token, window by window in order: several windows, each from an empty state, in one call of
  // the model. `tokens` of each window: its document's. Returns the sum by window.
  struct Piece {
    std::span<const std::int32_t> document;
    Window window;
  };
  std::vector<double> windows(std::span<const Piece> pieces);

  // Loss of tokens 1.. of one sequence, read in pieces of `length` tokens with the state carried from one to the next:
  // losses[i] is that of token i + 1.
  std::vector<float> carried(std::span<const std::int32_t> tokens, std::int64_t length);
  // The same from `state`, of one sequence, which goes along; it has room for all tokens but the last.
  std::vector<float> carried(std::span<const std::int32_t> tokens, std::int64_t length, model::DecodeState& state);

 private:
  // f32 [tokens] on the CPU.
  std::vector<float> losses(const std::vector<std::int32_t>& tokens, const std::vector<std::int32_t>& targets,
                            const std::vector<std::int32_t>& bounds, model::DecodeState* state);
  Context& context_;
  model::LanguageModel& model_;
};

}  // namespace flashgla::eval
