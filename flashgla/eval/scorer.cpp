#include "flashgla/eval/scorer.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "flashgla/base/error.h"
#include "flashgla/base/memory.h"
#include "flashgla/ops/elementwise/elementwise.h"

namespace flashgla::eval {
namespace {

// Positions whose logits are in memory at once.
constexpr std::int64_t kLogitRows = 256;
// Of the states that one batch carries.
constexpr std::size_t kStateBytes = std::size_t{512} << 20;

Tensor on_device(Context& context, const void* data, const Shape& shape, DType dtype) {
  Tensor tensor = Tensor::empty(shape, dtype, context.device());
  copy_memory(tensor->data, tensor->device, data, Device::cpu(), tensor->bytes());
  return tensor;
}

std::string name_of(const Request& request, std::size_t number) {
  return request.name.empty() ? "request " + std::to_string(number) : request.name;
}

void check(const Request& request, std::size_t number, std::int64_t vocabulary) {
  const std::string name = name_of(request, number);
  if (request.context.empty()) throw Error("score: " + name + " has no context; a begin-of-text token would do");
  if (request.continuation.empty()) throw Error("score: " + name + " has no continuation");
  for (const text::TokenIds* ids : {&request.context, &request.continuation}) {
    for (const std::int32_t id : *ids) {
      if (id < 0 || id >= vocabulary) {
        throw Error("score", "token of " + name, "is " + std::to_string(id), "0 .. " + std::to_string(vocabulary - 1));
      }
    }
  }
}

}  // namespace

struct Scorer::Group {
  const text::TokenIds* context;
  std::vector<std::size_t> requests;
  std::int64_t tokens = 0;  // that the model reads for it
};

struct Scorer::Sequence {
  struct Target {
    std::int64_t position;  // whose logits predict it
    std::int32_t token;
    std::size_t request;
  };
  std::span<const std::int32_t> first, second;  // its tokens, in two parts
  std::vector<Target> targets;                  // by position
};

Score score_of(std::span<const float> logits, std::int32_t target) {
  const auto most = std::max_element(logits.begin(), logits.end());
  const double top = *most;
  double sum = 0.0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - top);
  return {static_cast<double>(logits[static_cast<std::size_t>(target)]) - top - std::log(sum),
          most - logits.begin() == target};
}

Scorer::Scorer(Context& context, model::LanguageModel& model, ScoreOptions options)
    : context_(context), model_(model), options_(options) {
  if (model.dtype() == DType::f64) throw Error("score: a model in f64 is for checking gradients; load it as f32");
  if (options.batch_tokens < 1) throw Error("score", "batch_tokens", std::to_string(options.batch_tokens), "1 or more");
  if (context.architecture().matrix_units && model.dtype() == DType::bf16) model.set_inference_dtype(DType::bf16);
}

std::vector<Score> Scorer::score(std::span<const Request> requests, const std::function<bool(std::size_t)>& progress) {
  std::vector<Group> groups;
  std::map<text::TokenIds, std::size_t> by_context;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const Request& request = requests[i];
    check(request, i, model_.config().vocab_size);
    std::size_t group = groups.size();
    if (options_.reuse_prefixes) group = by_context.try_emplace(request.context, group).first->second;
    if (group == groups.size())
      groups.push_back({&request.context, {}, static_cast<std::int64_t>(request.context.size())});
    groups[group].requests.push_back(i);
    groups[group].tokens += static_cast<std::int64_t>(request.continuation.size()) - 1;
  }
  std::stable_sort(groups.begin(), groups.end(), [](const Group& a, const Group& b) { return a.tokens > b.tokens; });

  std::vector<Score> scores(requests.size());
  std::size_t done = 0;
  for (std::size_t begin = 0; begin < groups.size();) {
    std::int64_t tokens = groups[begin].tokens;
    std::size_t end = begin + 1, sequences = groups[begin].requests.size(), longest = 0;
    for (const std::size_t i : groups[begin].requests) longest = std::max(longest, requests[i].continuation.size());
    longest += groups[begin].context->size();
    const std::size_t bytes = model_.make_state(1, static_cast<std::int64_t>(longest)).bytes();
    while (end < groups.size() && tokens + groups[end].tokens <= options_.batch_tokens &&
           (sequences + groups[end].requests.size()) * bytes <= kStateBytes) {
      tokens += groups[end].tokens;
      sequences += groups[end].requests.size();
      ++end;
    }
    score_batch(requests, std::span(groups).subspan(begin, end - begin), scores);
    for (std::size_t i = begin; i < end; ++i) done += groups[i].requests.size();
    begin = end;
    if (progress && !progress(done)) throw Error("score: stopped");
  }
  for (std::size_t i = 0; i < scores.size(); ++i) {
    if (!std::isnan(scores[i].log_likelihood)) continue;
    throw Error("score: " + name_of(requests[i], i) +
                ": the log-likelihood is NaN; the model's weights may be damaged");
  }
  return scores;
}

void Scorer::score_batch(std::span<const Request> requests, std::span<const Group> groups, std::vector<Score>& scores) {
  for (const Group& group : groups) {
    for (const std::size_t i : group.requests) scores[i] = {0.0, true};
  }
  // Contexts, with the continuation of a request that has one to itself.
  std::vector<Sequence> sequences, later;
  std::vector<std::int64_t> sources;  // of the later sequences: the sequence that they go on from
  std::int64_t longest = 0;
  for (const Group& group : groups) {
    Sequence sequence{*group.context, {}, {}};
    const auto last = static_cast<std::int64_t>(group.context->size()) - 1;
    const auto source = static_cast<std::int64_t>(sequences.size());
    for (const std::size_t i : group.requests) sequence.targets.push_back({last, requests[i].continuation[0], i});
    for (const std::size_t i : group.requests) {
      const std::span<const std::int32_t> continuation = requests[i].continuation;
      const auto read = continuation.first(continuation.size() - 1);
      longest = std::max(longest, last + 1 + static_cast<std::int64_t>(read.size()));
      if (read.empty()) continue;
      const bool alone = group.requests.size() == 1;
      Sequence& reader = alone ? sequence : later.emplace_back();
      const std::int64_t before = alone ? last + 1 : 0;
      (alone ? reader.second : reader.first) = read;
      if (!alone) sources.push_back(source);
      for (std::size_t j = 0; j < read.size(); ++j) {
        reader.targets.push_back({before + static_cast<std::int64_t>(j), continuation[j + 1], i});
      }
    }
    sequences.push_back(std::move(sequence));
  }
  if (later.empty()) {
    read(sequences, nullptr, scores);
    return;
  }
  model::DecodeState state = model_.make_state(static_cast<std::int64_t>(sequences.size()), longest);
  read(sequences, &state, scores);
  model::DecodeState copies = model_.make_state(static_cast<std::int64_t>(later.size()), longest);
  for (std::size_t i = 0; i < sources.size(); ++i) {
    copies.copy_sequence(static_cast<std::int64_t>(i), state, sources[i]);
  }
  read(later, &copies, scores);
}

TensorView Scorer::hidden_states(const std::vector<std::int32_t>& tokens, const std::vector<std::int32_t>& bounds,
                                 model::DecodeState* state) {
  const auto total = static_cast<std::int64_t>(tokens.size());
  tokens_read_ += total;
  const TensorView host(const_cast<std::int32_t*>(bounds.data()), Shape({static_cast<std::int64_t>(bounds.size())}));
  const Tensor ids = on_device(context_, tokens.data(), Shape({1, total}), DType::i32);
  const Tensor device_bounds = on_device(context_, bounds.data(), host.shape, DType::i32);
  nn::Pass pass{context_};
  pass.sequences = {device_bounds, host, 0};
  const TensorView hidden = context_.scratch().tensor(Shape({total, model_.config().hidden_size}),
                                                      model_.activation_dtype(), "scores: hidden");
  model_.hidden_states(pass, ids, hidden, state);
  context_.queue().synchronize();
  return hidden;
}

const float* Scorer::logits_of(const TensorView& hidden, std::span<const std::int64_t> rows) {
  const ArenaScope scope(context_.scratch());
  const std::int64_t vocabulary = model_.config().vocab_size;
  const auto count = static_cast<std::int64_t>(rows.size());
  const TensorView chosen = context_.scratch().tensor(Shape({count, hidden.size(1)}), hidden.dtype, "scores: hidden");
  for (std::int64_t i = 0; i < count;) {  // runs of neighbours at once
    std::int64_t end = i + 1;
    while (end < count && rows[static_cast<std::size_t>(end)] == rows[static_cast<std::size_t>(end - 1)] + 1) ++end;
    const std::int64_t from = rows[static_cast<std::size_t>(i)];
    ops::elementwise::convert(context_, hidden.slice(0, from, from + end - i), chosen.slice(0, i, end));
    i = end;
  }
  const TensorView logits = context_.scratch().tensor(Shape({count, vocabulary}), DType::f32, "scores: logits");
  model_.logits(context_, chosen, logits);
  if (!host_logits_) host_logits_ = Tensor::empty(Shape({kLogitRows, vocabulary}), DType::f32);
  context_.queue().synchronize();
  copy_memory(host_logits_->data, Device::cpu(), logits.data, logits.device, logits.bytes());
  return host_logits_.as<float>();
}

void Scorer::read(std::span<const Sequence> sequences, model::DecodeState* state, std::vector<Score>& scores) {
  const ArenaScope scope(context_.scratch());
  std::vector<std::int32_t> tokens, bounds = {0};
  struct Target {
    std::int64_t row;
    std::int32_t token;
    std::size_t request;
  };
  std::vector<Target> targets;
  for (const Sequence& sequence : sequences) {
    for (const auto& target : sequence.targets) {
      targets.push_back({bounds.back() + target.position, target.token, target.request});
    }
    tokens.insert(tokens.end(), sequence.first.begin(), sequence.first.end());
    tokens.insert(tokens.end(), sequence.second.begin(), sequence.second.end());
    bounds.push_back(static_cast<std::int32_t>(tokens.size()));
  }
  const TensorView hidden = hidden_states(tokens, bounds, state);
  for (std::size_t i = 0; state != nullptr && i < sequences.size(); ++i) {
    state->history[i].add(std::span<const std::int32_t>(tokens).subspan(
        static_cast<std::size_t>(bounds[i]), static_cast<std::size_t>(bounds[i + 1] - bounds[i])));
  }
  const auto vocabulary = static_cast<std::size_t>(model_.config().vocab_size);
  std::vector<std::int64_t> rows;
  for (std::size_t begin = 0; begin < targets.size();) {
    rows.clear();
    std::size_t end = begin;
    while (end < targets.size() && (targets[end].row == (rows.empty() ? -1 : rows.back()) ||
                                    static_cast<std::int64_t>(rows.size()) < kLogitRows)) {
      if (rows.empty() || rows.back() != targets[end].row) rows.push_back(targets[end].row);
      ++end;
    }
    const float* logits = logits_of(hidden, rows);
    std::vector<std::size_t> place(end - begin);  // of each target among the rows
    for (std::size_t i = begin, row = 0; i < end; ++i) {
      if (targets[i].row != rows[row]) ++row;
      place[i - begin] = row;
    }
    std::vector<Score> parts(end - begin);
    parallel_for(context_, static_cast<std::int64_t>(parts.size()), [&](std::int64_t i) {
      const auto n = static_cast<std::size_t>(i);
      parts[n] = score_of({logits + place[n] * vocabulary, vocabulary}, targets[begin + n].token);
    });
    for (std::size_t i = 0; i < parts.size(); ++i) {
      Score& score = scores[targets[begin + i].request];
      score.log_likelihood += parts[i].log_likelihood;
      score.greedy = score.greedy && parts[i].greedy;
    }
    begin = end;
  }
}

Tensor Scorer::logits(std::span<const std::int32_t> tokens) {
  const std::int64_t vocabulary = model_.config().vocab_size;
  if (tokens.empty()) throw Error("logits: there are no tokens");
  for (const std::int32_t id : tokens) {
    if (id < 0 || id >= vocabulary) {
      throw Error("logits", "token", "is " + std::to_string(id), "0 .. " + std::to_string(vocabulary - 1));
    }
  }
  const ArenaScope scope(context_.scratch());
  const auto count = static_cast<std::int64_t>(tokens.size());
  const TensorView hidden =
      hidden_states({tokens.begin(), tokens.end()}, {0, static_cast<std::int32_t>(count)}, nullptr);
  Tensor out = Tensor::empty(Shape({count, vocabulary}), DType::f32);
  std::vector<std::int64_t> rows;
  for (std::int64_t begin = 0; begin < count; begin += kLogitRows) {
    rows.resize(static_cast<std::size_t>(std::min(kLogitRows, count - begin)));
    std::iota(rows.begin(), rows.end(), begin);
    const float* logits = logits_of(hidden, rows);
    std::copy(logits, logits + static_cast<std::int64_t>(rows.size()) * vocabulary,
              out.as<float>() + begin * vocabulary);
  }
  return out;
}

}  // namespace flashgla::eval
