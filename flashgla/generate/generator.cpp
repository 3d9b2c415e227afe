#include "flashgla/generate/generator.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "flashgla/base/error.h"
#include "flashgla/generate/stop.h"

namespace flashgla::generate {

namespace {
// Tokens of one call of prefill: enough for full speed, little beside the weights.
constexpr std::int64_t kPieceTokens = 2048;
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

Session::Session(const model::LanguageModel& model, std::int64_t sequences)
    : state(model.make_state(sequences)),
      logits(Tensor::zeros({sequences, model.config().vocab_size}, DType::f32)),
      seen(Tensor::zeros({sequences, model.config().vocab_size}, DType::u8)) {}

void Session::reset() {
  state.reset();
  std::memset(logits->data, 0, logits->bytes());
  std::memset(seen->data, 0, seen->bytes());
}

std::vector<model::NamedTensor> Session::beside_state() const { return {{"logits", logits}, {"seen", seen}}; }

void Session::save(const model::LanguageModel& model, const std::string& path) const {
  model::save_state(model, state, path, beside_state());
}

void Session::load(const model::LanguageModel& model, const std::string& path) {
  model::DecodeState loaded = model::load_state(model, path, beside_state());
  if (loaded.sequences() != sequences()) {
    throw Error(path + ": holds " + std::to_string(loaded.sequences()) + " sequences; expected " +
                std::to_string(sequences()));
  }
  state = std::move(loaded);
}

bool Session::fresh() const {
  return std::all_of(state.history.begin(), state.history.end(),
                     [](const auto& history) { return history.tokens == 0; });
}

Generator::Generator(Context& context, model::LanguageModel& model, const text::Tokenizer& tokenizer)
    : context_(context), model_(model), tokenizer_(tokenizer) {
  if (tokenizer.vocab_size() > model.config().vocab_size) {
    throw Error("generation: the tokenizer has " + std::to_string(tokenizer.vocab_size()) +
                " tokens, the model's vocab_size is " + std::to_string(model.config().vocab_size) +
                "; they do not belong together");
  }
}

text::TokenIds Generator::encode(std::string_view text, bool begins) const {
  text::TokenIds ids;
  if (begins && tokenizer_.adds_bos()) ids.push_back(tokenizer_.bos_id());
  const text::TokenIds body = tokenizer_.encode(text);
  ids.insert(ids.end(), body.begin(), body.end());
  if (ids.empty() && begins && tokenizer_.eos_id() >= 0) ids.push_back(tokenizer_.eos_id());
  return ids;
}

namespace {
// Tokens of the sequence that has had most.
std::int64_t longest_of(const model::DecodeState& state) {
  std::int64_t longest = 0;
  for (const model::DecodeState::History& history : state.history) longest = std::max(longest, history.tokens);
  return longest;
}
}  // namespace

void Generator::feed(Session& session, const std::vector<text::TokenIds>& tokens) const {
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
      session.seen.as<std::uint8_t>()[i * static_cast<std::size_t>(vocabulary) + static_cast<std::size_t>(token)] = 1;
    }
  }
  session.state.reserve(longest_of(session.state) + longest);
  // Every piece has a token of each sequence.
  const std::int64_t pieces = std::min((total + kPieceTokens - 1) / kPieceTokens, shortest);
  std::vector<std::int32_t> ids;
  std::vector<std::int32_t> bounds;
  for (std::int64_t piece = 0; piece < pieces; ++piece) {
    ids.clear();
    bounds.assign(1, 0);
    for (const text::TokenIds& sequence : tokens) {
      const auto size = static_cast<std::int64_t>(sequence.size());
      ids.insert(ids.end(), sequence.begin() + size * piece / pieces, sequence.begin() + size * (piece + 1) / pieces);
      bounds.push_back(static_cast<std::int32_t>(ids.size()));
    }
    const TensorView host(bounds.data(), Shape({sequences + 1}));
    model_.prefill(context_, TensorView(ids.data(), Shape({static_cast<std::int64_t>(ids.size())})), {host, host, 0},
                   session.state, session.logits);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      session.state.history[i].add(std::span<const std::int32_t>(ids).subspan(
          static_cast<std::size_t>(bounds[i]), static_cast<std::size_t>(bounds[i + 1] - bounds[i])));
    }
  }
}

std::vector<Generation> Generator::generate(Session& session, const GenerateOptions& options,
                                            const std::function<void(std::size_t, std::string_view)>& on_text) const {
  const auto sequences = static_cast<std::size_t>(session.sequences());
  const auto vocabulary = static_cast<std::size_t>(model_.config().vocab_size);
  if (options.max_tokens < 0) throw Error("generation", "max_tokens", std::to_string(options.max_tokens), "0 or more");
  session.state.reserve(longest_of(session.state) + options.max_tokens);
  Sampler sampler(options.sampling, static_cast<std::int64_t>(vocabulary));
  const std::int32_t end = tokenizer_.eos_id();
  auto* all_seen = session.seen.as<std::uint8_t>();

  struct Active {
    text::StreamDecoder decoder;
    StopMatcher matcher;
    bool running = true;
  };
  std::vector<Active> active;
  for (std::size_t i = 0; i < sequences; ++i) {
    const std::int32_t begin = tokenizer_.bos_id();
    const bool first = session.state.history[i].tokens == 1 && begin >= 0 &&
                       all_seen[i * vocabulary + static_cast<std::size_t>(begin)] != 0;
    active.push_back({text::StreamDecoder(tokenizer_, first), StopMatcher(options.stop)});
  }
  std::vector<Generation> results(sequences);
  std::vector<std::int32_t> next(sequences, std::max(end, 0));
  const bool penalize = options.sampling.repetition_penalty != 1.0;

  const auto give = [&](std::size_t i, const std::string& text) {
    if (!text.empty() && on_text) on_text(i, text);
  };
  const auto finish = [&](std::size_t i, Finish how) {
    active[i].running = false;
    results[i].finish = how;
    if (how == Finish::stop_string) return;
    give(i, active[i].matcher.push(active[i].decoder.finish()));
    if (!active[i].matcher.stopped()) give(i, active[i].matcher.finish());
  };

  std::size_t running = sequences;
  for (std::int64_t t = 0; t < options.max_tokens && running > 0; ++t) {
    const bool interrupted = options.should_stop && options.should_stop();
    bool any = false;
    for (std::size_t i = 0; i < sequences; ++i) {
      if (!active[i].running) continue;
      if (interrupted) {
        finish(i, Finish::interrupted);
        --running;
        continue;
      }
      const std::span<const float> logits(session.logits.as<float>() + i * vocabulary, vocabulary);
      const std::span<const std::uint8_t> seen(all_seen + i * vocabulary, vocabulary);
      const auto position = static_cast<std::uint64_t>(session.state.history[i].tokens);
      const std::int32_t token = sampler.sample(logits, penalize ? seen : std::span<const std::uint8_t>(), i, position);
      if (options.stop_at_end && token == end) {
        finish(i, Finish::end_of_text);
        --running;
        continue;
      }
      next[i] = token;
      any = true;
      all_seen[i * vocabulary + static_cast<std::size_t>(token)] = 1;
      ++results[i].tokens;
      // Rows beyond the tokenizer (a padded vocabulary) stand for no text.
      if (token < tokenizer_.vocab_size()) give(i, active[i].matcher.push(active[i].decoder.push(token)));
      if (active[i].matcher.stopped()) {
        finish(i, Finish::stop_string);
        --running;
      } else if (t + 1 == options.max_tokens) {
        finish(i, Finish::length);
        --running;
      }
    }
    // Sequences that have ended run along; their state is of no more use, unless all end together.
    if (!any) continue;
    model_.step(context_, TensorView(next.data(), Shape({session.sequences()})), session.state, session.logits);
    for (std::size_t i = 0; i < sequences; ++i) session.state.history[i].add(next[i]);
  }
  return results;
}

}  // namespace flashgla::generate
