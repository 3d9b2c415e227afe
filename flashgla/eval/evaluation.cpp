#include "flashgla/eval/evaluation.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "flashgla/base/error.h"
#include "flashgla/eval/jobs.h"
#include "flashgla/model/checkpoint.h"

namespace flashgla::eval {
namespace {

using nlohmann::json;

// Examples whose tokens come to a few batches are one job, so that the scorer can pack them.
constexpr std::int64_t kBatchesInJob = 4;

// The state after the first `count` tokens of a document: as an evaluation that ended there left it, or by reading
// them.
model::DecodeState state_after(const Work& work, LossReader& reader, std::span<const std::int32_t> tokens,
                               std::int64_t count, std::int64_t window) {
  const auto most = static_cast<std::int64_t>(tokens.size()) - 1;
  model::DecodeState::History history;
  history.add(tokens.first(static_cast<std::size_t>(count)));
  if (count > 0 && !work.state_file.empty() && std::filesystem::exists(work.state_file)) {
    model::DecodeState state = model::load_state(work.model, work.state_file);
    if (state.sequences() == 1 && state.history[0] == history) {
      state.reserve(most);
      return state;
    }
  }
  model::DecodeState state = work.model.make_state(1, most);
  reader.carried(tokens.first(static_cast<std::size_t>(count + 1)), window, state);
  return state;
}

// Jobs of one document that is read with the state carried. `add` takes each job's result.
template <class Add>
void carry_document(const Work& work, LossReader& reader, std::span<const std::int32_t> tokens,
                    const LossOptions& options, const LossResult& result, Add&& add) {
  if (options.window < 1) throw Error("evaluate", "window", "is " + std::to_string(options.window), "1 or more tokens");
  const auto predicted = static_cast<std::int64_t>(tokens.size()) - 1;
  const std::int64_t in_job = std::max<std::int64_t>(options.batch_tokens / options.window, 1) * options.window;
  std::optional<model::DecodeState> state;
  std::int64_t begin = 0;
  while (begin < predicted && result.complete) {
    const std::int64_t end = std::min(begin + in_job, predicted);
    add(result_of(work, result.jobs, [&] {
      if (!state || state->history[0].tokens != begin) {
        state = state_after(work, reader, tokens, begin, options.window);
      }
      double loss = 0.0;
      const auto read = tokens.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin + 1));
      for (const float each : reader.carried(read, options.window, *state)) loss += each;
      return json{{"loss", loss}, {"tokens", end - begin}};
    }));
    begin = end;
  }
  if (state && begin < predicted && !work.state_file.empty()) model::save_state(work.model, *state, work.state_file);
}

}  // namespace

LossResult evaluate_loss(const Work& work, std::span<const Document> documents, const LossOptions& options) {
  LossResult result;
  std::int64_t total = 0;
  bool bytes = true, words = true;
  for (const Document& document : documents) {
    total += std::max<std::int64_t>(static_cast<std::int64_t>(document.tokens.size()) - 1, 0);
    result.bytes += document.bytes;
    result.words += document.words;
    bytes = bytes && document.bytes > 0;
    words = words && document.words > 0;
  }
  if (!bytes) result.bytes = 0;
  if (!words) result.words = 0;
  if (total == 0) throw Error("evaluate: no token is predicted: the data have no document of two tokens");
  result.documents = static_cast<std::int64_t>(documents.size());
  LossReader reader(work.context, work.model);

  const auto add = [&](const json& job) {
    result.loss += job.at("loss").get<double>();
    result.tokens += job.at("tokens").get<std::int64_t>();
    ++result.jobs;
    result.complete =
        goes_on(work, result.tokens, total, result.loss / static_cast<double>(result.tokens)) || result.tokens == total;
  };
  std::vector<LossReader::Piece> batch;
  std::int64_t batch_tokens = 0, predicted = 0;
  const auto flush = [&] {
    if (batch.empty()) return;
    add(result_of(work, result.jobs, [&] {
      double loss = 0.0;
      for (const double sum : reader.windows(batch)) loss += sum;
      return json{{"loss", loss}, {"tokens", predicted}};
    }));
    batch.clear();
    batch_tokens = predicted = 0;
  };
  for (const Document& document : documents) {
    const auto size = static_cast<std::int64_t>(document.tokens.size());
    if (options.carry) {
      carry_document(work, reader, document.tokens, options, result, add);
      if (!result.complete) return result;
      continue;
    }
    for (const Window& window : windows_of(size, options.window, options.stride)) {
      const std::int64_t length = window.end - window.begin;
      if (batch_tokens + length > options.batch_tokens) flush();
      if (!result.complete) return result;
      batch.push_back({document.tokens, window});
      batch_tokens += length;
      predicted += window.end - window.first + 1;
    }
  }
  flush();
  return result;
}

PositionResult evaluate_positions(const Work& work, std::span<const Document> documents,
                                  const PositionOptions& options) {
  if (options.length < 1) throw Error("evaluate", "extrapolate", std::to_string(options.length), "1 or more tokens");
  if (options.bucket < 1) throw Error("evaluate", "bucket", std::to_string(options.bucket), "1 or more tokens");
  text::TokenIds stream;
  for (const Document& document : documents)
    stream.insert(stream.end(), document.tokens.begin(), document.tokens.end());
  const std::int64_t there = (static_cast<std::int64_t>(stream.size()) - 1) / options.length;
  if (there < 1) {
    throw Error("evaluate: the data have " + std::to_string(stream.size()) + " tokens; a sequence of " +
                std::to_string(options.length) + " positions needs " + std::to_string(options.length + 1));
  }
  PositionResult result;
  result.sequences = options.sequences > 0 ? std::min(there, options.sequences) : there;
  const auto buckets = static_cast<std::size_t>((options.length + options.bucket - 1) / options.bucket);
  std::vector<double> sums(buckets, 0.0);
  result.tokens.assign(buckets, 0);
  LossReader reader(work.context, work.model);
  double loss = 0.0;
  std::int64_t done = 0;
  for (std::int64_t i = 0; i < result.sequences && result.complete; ++i) {
    const json job = result_of(work, i, [&] {
      const std::int64_t place = i * there / result.sequences;  // spread over the data
      const auto tokens = std::span(stream).subspan(static_cast<std::size_t>(place * options.length),
                                                    static_cast<std::size_t>(options.length + 1));
      std::vector<double> parts(buckets, 0.0);
      const std::vector<float> losses = reader.carried(tokens, options.window);
      for (std::size_t t = 0; t < losses.size(); ++t) parts[t / static_cast<std::size_t>(options.bucket)] += losses[t];
      return json{{"losses", parts}};
    });
    for (std::size_t bucket = 0; bucket < buckets; ++bucket) {
      sums[bucket] += job.at("losses").at(bucket).get<double>();
      loss += job.at("losses").at(bucket).get<double>();
      result.tokens[bucket] +=
          std::min(options.bucket, options.length - static_cast<std::int64_t>(bucket) * options.bucket);
    }
    ++result.jobs;
    done += options.length;
    const bool last = i + 1 == result.sequences;
    result.complete = goes_on(work, done, result.sequences * options.length, loss / static_cast<double>(done)) || last;
  }
  for (std::size_t bucket = 0; bucket < buckets; ++bucket) {
    result.losses.push_back(sums[bucket] / static_cast<double>(result.tokens[bucket]));
  }
  return result;
}

ExampleResult evaluate_examples(const Work& work, const text::Tokenizer& tokenizer, std::span<const Example> examples,
                                const ExampleOptions& options) {
  std::vector<Request> requests;
  std::vector<std::size_t> begins = {0};  // of each example's requests
  std::vector<std::int64_t> tokens;       // of each example
  std::int64_t total = 0;
  for (std::size_t i = 0; i < examples.size(); ++i) {
    tokens.push_back(0);
    for (const std::string& choice : examples[i].choices) {
      try {
        requests.push_back(
            encode_pair(tokenizer, examples[i].context, examples[i].delimiter + choice, options.longest));
      } catch (const Error& error) {
        throw Error(examples[i].name + ": " + error.what());
      }
      requests.back().name = examples[i].name;
      tokens.back() += static_cast<std::int64_t>(requests.back().context.size() + requests.back().continuation.size());
    }
    begins.push_back(requests.size());
    total += tokens.back();
  }
  ExampleResult result;
  Scorer scorer(work.context, work.model, options.score);
  std::int64_t done = 0;
  for (std::size_t begin = 0; begin < examples.size() && result.complete;) {
    std::size_t end = begin;
    std::int64_t size = 0;
    while (end < examples.size() && (end == begin || size < kBatchesInJob * options.score.batch_tokens)) {
      size += tokens[end++];
    }
    const auto wanted = std::span(requests).subspan(begins[begin], begins[end] - begins[begin]);
    const json job = result_of(work, result.jobs, [&] {
      json rows = json::array();
      for (const Score& score : scorer.score(wanted)) rows.push_back({score.log_likelihood, score.greedy});
      return json{{"scores", rows}};
    });
    for (std::size_t i = begin; i < end; ++i) {
      std::vector<Score>& scores = result.scores.emplace_back();
      for (std::size_t j = begins[i]; j < begins[i + 1]; ++j) {
        const json& row = job.at("scores").at(j - begins[begin]);
        scores.push_back({row.at(0).get<double>(), row.at(1).get<bool>()});
      }
      if (examples[i].answer) {
        const Verdict verdict = judge(examples[i], scores);
        result.acc += verdict.acc;
        result.acc_norm += verdict.acc_norm;
        result.acc_bytes += verdict.acc_bytes;
      } else {
        result.greedy += scores[0].greedy;
        result.log_likelihood += scores[0].log_likelihood;
      }
    }
    ++result.jobs;
    done += size;
    result.done = static_cast<std::int64_t>(end);
    const double share = static_cast<double>(result.acc + result.greedy) / static_cast<double>(end);
    result.complete = goes_on(work, done, total, share) || end == examples.size();
    begin = end;
  }
  result.tokens_read = scorer.tokens_read();
  return result;
}

}  // namespace flashgla::eval
