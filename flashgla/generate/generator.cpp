#include "flashgla/generate/generator.h"

#include <algorithm>
#include <limits>

#include "flashgla/base/error.h"
#include "flashgla/generate/decoding.h"
#include "flashgla/generate/stop.h"
#include "flashgla/ops/sampling/sampling.h"

namespace flashgla::generate {

namespace {
// Tokens of one call of prefill: enough for full speed, little beside the weights.
constexpr std::int64_t kPieceTokens = 2048;

// What becomes of the tokens of a call of generate: texts in whole characters, and each sequence's end.
class Texts {
 public:
  Texts(const text::Tokenizer& tokenizer, const Session& session, const GenerateOptions& options,
        const std::function<void(std::size_t, std::string_view)>& on_text)
      : tokenizer_(tokenizer), options_(options), on_text_(on_text), results_(session.state.history.size()) {
    model::DecodeState::History begun;  // nothing but the bos has been seen: the text begins here
    if (tokenizer.bos_id() >= 0) begun.add(tokenizer.bos_id());
    for (const model::DecodeState::History& history : session.state.history) {
      const bool first = tokenizer.bos_id() >= 0 && history == begun;
      active_.push_back({text::StreamDecoder(tokenizer, first), StopMatcher(options.stop)});
    }
    running_ = active_.size();
  }

  std::size_t running() const { return running_; }
  const std::vector<Generation>& results() const { return results_; }

  // One token of each sequence. Returns whether any is to be taken in by the model.
  bool take(std::span<const std::int32_t> tokens, bool last) {
    bool any = false;
    for (std::size_t i = 0; i < active_.size(); ++i) {
      Active& active = active_[i];
      if (!active.running) continue;
      const std::int32_t token = tokens[i];
      if (options_.stop_at_end && token == tokenizer_.eos_id()) {
        finish(i, Finish::end_of_text);
        continue;
      }
      any = true;
      ++results_[i].tokens;
      // Rows beyond the tokenizer (a padded vocabulary) stand for no text.
      if (token < tokenizer_.vocab_size()) give(i, active.matcher.push(active.decoder.push(token)));
      if (active.matcher.stopped()) {
        finish(i, Finish::stop_string);
      } else if (last) {
        finish(i, Finish::length);
      }
    }
    return any;
  }

  void interrupt() {
    for (std::size_t i = 0; i < active_.size(); ++i) {
      if (active_[i].running) finish(i, Finish::interrupted);
    }
  }

 private:
  struct Active {
    text::StreamDecoder decoder;
    StopMatcher matcher;
    bool running = true;
  };

  void give(std::size_t i, const std::string& text) {
    if (!text.empty() && on_text_) on_text_(i, text);
  }

  void finish(std::size_t i, Finish how) {
    Active& active = active_[i];
    active.running = false;
    --running_;
    results_[i].finish = how;
    if (how == Finish::stop_string) return;
    give(i, active.matcher.push(active.decoder.finish()));
    if (!active.matcher.stopped()) give(i, active.matcher.finish());
  }

  const text::Tokenizer& tokenizer_;
  const GenerateOptions& options_;
  const std::function<void(std::size_t, std::string_view)>& on_text_;
  std::vector<Active> active_;
  std::vector<Generation> results_;
  std::size_t running_ = 0;
};

}  // namespace

const char* name_of(Finish finish) {
  switch (finish) {
    case Finish::length:
      return "length";
    case Finish::stop_string:
      return "stop";
    case Finish::end_of_text:
      return "end";
    case Finish::interrupted:
      return "interrupted";
  }
  return "";
}

Generator::Generator(Context& context, model::LanguageModel& model, const text::Tokenizer& tokenizer)
    : context_(context), model_(model), tokenizer_(tokenizer) {
  if (tokenizer.vocab_size() > model.config().vocab_size) {
    throw Error("generation: the tokenizer has " + std::to_string(tokenizer.vocab_size()) +
                " tokens, the model's vocab_size is " + std::to_string(model.config().vocab_size) +
                "; they do not belong together");
  }
  if (context.architecture().matrix_units && model.dtype() == DType::bf16) model.set_inference_dtype(DType::bf16);
}

text::TokenIds Generator::encode(std::string_view text, bool begins) const {
  text::TokenIds ids = tokenizer_.encode(text);
  // A text that spells the begin-of-text token has it.
  const bool has_bos = !ids.empty() && ids.front() == tokenizer_.bos_id();
  if (begins && tokenizer_.adds_bos() && !has_bos) ids.insert(ids.begin(), tokenizer_.bos_id());
  if (ids.empty() && begins && tokenizer_.eos_id() >= 0) ids.push_back(tokenizer_.eos_id());
  return ids;
}

std::int64_t Generator::feed(Session& session, const std::vector<text::TokenIds>& tokens,
                             const std::function<bool()>& should_stop) const {
  const std::int64_t sequences = session.sequences();
  const std::int64_t vocabulary = model_.config().vocab_size;
  if (static_cast<std::int64_t>(tokens.size()) != sequences) {
    throw Error("generation", "tokens", "are of " + std::to_string(tokens.size()) + " sequences",
                std::to_string(sequences) + " (as the session)");
  }
  std::int64_t total = 0;
  std::int64_t shortest = std::numeric_limits<std::int64_t>::max();
  std::int64_t longest = 0;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const auto size = static_cast<std::int64_t>(tokens[i].size());
    if (size == 0) throw Error("generation: prompt " + std::to_string(i + 1) + " has no token");
    total += size;
    shortest = std::min(shortest, size);
    longest = std::max(longest, size);
    for (const std::int32_t token : tokens[i]) {
      if (token < 0 || token >= vocabulary) {
        throw Error("generation", "token", "is " + std::to_string(token), "0 to " + std::to_string(vocabulary - 1));
      }
    }
  }
  session.state.reserve(session.longest() + longest);
  // Every piece has a token of each sequence.
  const std::int64_t pieces = std::min((total + kPieceTokens - 1) / kPieceTokens, shortest);
  std::vector<std::int32_t> ids;
  std::vector<std::int32_t> bounds;
  std::int64_t taken = 0;
  for (std::int64_t piece = 0; piece < pieces; ++piece) {
    if (piece > 0 && should_stop && should_stop()) break;
    ids.clear();
    bounds.assign(1, 0);
    for (const text::TokenIds& sequence : tokens) {
      const auto size = static_cast<std::int64_t>(sequence.size());
      ids.insert(ids.end(), sequence.begin() + size * piece / pieces, sequence.begin() + size * (piece + 1) / pieces);
      bounds.push_back(static_cast<std::int32_t>(ids.size()));
    }
    const ArenaScope scope(context_.scratch());
    const TensorView host(bounds.data(), Shape({sequences + 1}));
    const nn::Sequences packed{on_device(context_, host, "prompt"), host, 0};
    const TensorView given =
        on_device(context_, TensorView(ids.data(), Shape({static_cast<std::int64_t>(ids.size())})), "prompt");
    ops::sampling::mark_seen(context_, given, packed.bounds, session.seen);
    model_.prefill(context_, given, packed, session.state, session.logits);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      session.state.history[i].add(std::span<const std::int32_t>(ids).subspan(
          static_cast<std::size_t>(bounds[i]), static_cast<std::size_t>(bounds[i + 1] - bounds[i])));
    }
    taken += bounds.back();
  }
  return taken;
}

std::vector<Generation> Generator::generate(Session& session, const GenerateOptions& options,
                                            const std::function<void(std::size_t, std::string_view)>& on_text) const {
  if (options.max_tokens < 0) throw Error("generation", "max_tokens", std::to_string(options.max_tokens), "0 or more");
  session.state.reserve(session.longest() + options.max_tokens);
  Texts texts(tokenizer_, session, options, on_text);
  if (options.max_tokens == 0) return texts.results();  // there need be no room for a step, not even to plan one
  Decoding decoding(context_, model_, session, options.sampling);
  // Where no token can end a text, or none is needed after it, the device goes on to the next one while the host looks
  // at the last. The CPU would do it first, and in vain where a text ends.
  const bool ahead =
      (!options.stop_at_end && options.stop.empty()) || (options.ends_session && context_.device() != Device::cpu());
  std::int64_t drawn = 0;
  for (std::int64_t t = 0; t < options.max_tokens && texts.running() > 0; ++t) {
    if (options.should_stop && options.should_stop()) {
      texts.interrupt();
      break;
    }
    if (drawn == t) {
      decoding.draw();
      ++drawn;
    }
    const bool stepped = ahead && drawn < options.max_tokens;
    if (stepped) {
      decoding.step();
      decoding.draw();
      ++drawn;
    }
    const std::span<const std::int32_t> tokens = decoding.tokens();
    if (!texts.take(tokens, t + 1 == options.max_tokens)) continue;
    if (!stepped) decoding.step();
    for (std::size_t i = 0; i < tokens.size(); ++i) session.state.history[i].add(tokens[i]);
  }
  context_.queue().synchronize();
  return texts.results();
}

}  // namespace flashgla::generate
