#include "flashgla/train/config.h"

#include <cfloat>
#include <cmath>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string_view>

#include "flashgla/base/error.h"
#include "flashgla/base/json.h"
#include "flashgla/base/memory.h"
#include "flashgla/base/names.h"
#include "flashgla/base/quantities.h"
#include "flashgla/base/threads.h"
#include "flashgla/nn/pass.h"
#include "flashgla/train/optimizer.h"

namespace flashgla::train {

namespace {

using Json = nlohmann::ordered_json;

template <class... F>
struct Overloaded : F... {
  using F::operator()...;
};
template <class... F>
Overloaded(F...) -> Overloaded<F...>;

std::string flag_of(const char* name) {
  std::string flag = name;
  for (char& c : flag) c = c == '_' ? '-' : c;
  return flag;
}

const Field* find(const std::vector<Field>& list, const std::string& name) {
  for (const Field& field : list) {
    if (name == field.name || name == flag_of(field.name)) return &field;
  }
  return nullptr;
}

[[noreturn]] void refuse_name(const std::string& source, const std::vector<Field>& list, const std::string& name) {
  std::vector<std::string> known;
  known.reserve(list.size());
  for (const Field& field : list) known.emplace_back(field.name);
  throw Error(source + ": there is no training field '" + name + "'" + did_you_mean(name, known));
}

void require(bool ok, const char* field, const std::string& actual, const std::string& expected) {
  if (!ok) throw Error("training configuration", field, "is " + actual, expected);
}

bool is_utf8(const std::string& text) {
  try {
    (void)Json(text).dump();
    return true;
  } catch (const Json::exception&) {
    return false;
  }
}

std::string text_of(double value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

}  // namespace

std::vector<Field> fields(TrainConfig& c) {
  return {
      {"model", "model and data",
       "a preset (`flashgla info --help` lists them), a folder with a config.json, such a file, or its text ({...}); a "
       "preset, a file or a text that does not say vocab_size takes the data's",
       &c.model},
      {"initial_weights", "model and data", "folder of a model whose weights the run starts from", &c.initial_weights},
      {"data", "model and data", "folder made by `flashgla data prepare`, or a text file", &c.data},
      {"out", "model and data", "run folder: metrics, checkpoints", &c.out},
      {"train_tokens", "length", "tokens to train on (such as 15B); 0: one pass over the data", &c.train_tokens},
      {"batch_tokens", "length", "tokens of one update", &c.batch_tokens},
      {"sequence_length", "length", "tokens of one sequence, or of one segment", &c.sequence_length},
      {"micro_batch", "length",
       "sequences of one forward and backward, gradients accumulated; 0: the whole batch, or as many as memory_limit "
       "allows",
       &c.micro_batch},
      {"order", "length",
       "packed: whole documents, back to back; segments: long stretches with the state carried; windows: random "
       "places; labelled: a task's sequences (`flashgla data mqar`), scored where it asks; automatic: labelled for a "
       "task, else packed, or windows in data of few documents",
       &c.order},
      {"segments", "length",
       "segments of sequence_length through which the state is carried (order segments); 0: through all of the data",
       &c.segments},
      {"learning_rate", "optimizer", "highest learning rate, reached after the warm-up", &c.learning_rate},
      {"initial_learning_rate", "optimizer", "rate at the start of the warm-up", &c.initial_learning_rate},
      {"final_learning_rate", "optimizer", "rate at the end of the cosine", &c.final_learning_rate},
      {"warmup_tokens", "optimizer", "tokens of the warm-up; -1: a fiftieth of train_tokens", &c.warmup_tokens},
      {"beta1", "optimizer", "AdamW: decay of the first moment", &c.beta1},
      {"beta2", "optimizer", "AdamW: decay of the second moment", &c.beta2},
      {"epsilon", "optimizer", "AdamW: added to the root of the second moment", &c.epsilon},
      {"weight_decay", "optimizer", "decoupled decay of matrices", &c.weight_decay},
      {"clip_norm", "optimizer", "gradients are scaled down to this global norm; 0: never", &c.clip_norm},
      {"dropout", "optimizer",
       "probability that an element of what a mixer or an MLP adds to the residual stream is 0 while training",
       &c.dropout},
      {"embedding_dropout", "optimizer", "the same of the embeddings; -1: as dropout", &c.embedding_dropout},
      {"attention_dropout", "optimizer", "the same of softmax attention's probabilities; -1: as dropout",
       &c.attention_dropout},
      {"optimizer_state", "optimizer",
       "full: f32 moments and master; split_master: the same bits in less memory; half: bf16 moments, rounded "
       "stochastically",
       &c.optimizer_state},
      {"device", "machine", "cpu, cuda[:N], or auto: the first GPU, and the CPU where there is none", &c.device},
      {"dtype", "machine", "f32, or bf16 with f32 master weights; automatic: bf16 on a GPU, f32 on the CPU", &c.dtype},
      {"threads", "machine", "CPU threads; 0: all", &c.threads},
      {"memory_limit", "machine",
       "most memory of the device that the run may take, such as 24GiB; empty: what is free on a GPU, all that the "
       "machine has on the CPU",
       &c.memory_limit},
      {"recompute", "machine",
       "what backward computes again: nothing, activations or block, less memory and more time; automatic: as little "
       "as memory_limit allows",
       &c.recompute},
      {"graphs", "machine", "on: steps are recorded and launched as CUDA graphs; off: operation by operation",
       &c.graphs},
      {"seed", "machine", "of the initial weights, the data's order and dropout", &c.seed},
      {"log_every", "records", "steps between rows of metrics.jsonl", &c.log_every},
      {"evaluate_every", "records",
       "steps between evaluations on validation data; 0: only with checkpoints and at the end", &c.evaluate_every},
      {"evaluation_tokens", "records",
       "most tokens of one evaluation, the same whatever micro_batch is; 0: all of the validation data",
       &c.evaluation_tokens},
      {"checkpoint_every", "records", "steps between checkpoints; 0: only at the end", &c.checkpoint_every},
      {"keep_checkpoints", "records", "latest checkpoints kept, beside the best", &c.keep_checkpoints},
      {"max_skipped_updates", "records", "updates in a row with a non-finite gradient after which the run stops",
       &c.max_skipped_updates},
      {"stop_accuracy", "length",
       "of a task: the run ends when validation reaches this share of right answers; 0: never", &c.stop_accuracy},
      {"patience", "length",
       "the run ends after so many evaluations in a row without a lower validation loss (nor, of a task, a higher "
       "accuracy); 0: never",
       &c.patience},
  };
}

std::string value_text(const Field& field) {
  return std::visit(Overloaded{[](const std::string* value) { return *value; },
                               [](const std::int64_t* value) { return std::to_string(*value); },
                               [](const double* value) { return text_of(*value); }},
                    field.value);
}

void set_field(TrainConfig& config, const std::string& name, const std::string& text) {
  const std::vector<Field> list = fields(config);
  const Field* field = find(list, name);
  if (field == nullptr) refuse_name("training configuration", list, name);
  // A model's own configuration is read when the model is built; that it is JSON at all is seen here.
  if (name == "model" && text.starts_with("{")) parse_json<Json>(text, "training configuration: model");
  try {
    std::visit(
        Overloaded{[&](std::string* value) { *value = text; }, [&](std::int64_t* value) { *value = parse_count(text); },
                   [&](double* value) { *value = parse_number(text); }},
        field->value);
  } catch (const Error& error) {
    throw Error(std::string("training configuration: ") + field->name + ": " + error.what());
  }
}

void parse_config(TrainConfig& config, const std::string& json, const std::string& source) {
  const Json root = parse_json<Json>(json, source);
  if (!root.is_object()) throw Error(source + ": expected a JSON object of training fields");
  TrainConfig result = config;
  const std::vector<Field> list = fields(result);
  for (const auto& [key, value] : root.items()) {
    if (key.starts_with("_")) continue;  // a comment
    const Field* field = find(list, key);
    if (field == nullptr) refuse_name(source, list, key);
    const bool text_wanted = std::holds_alternative<std::string*>(field->value);
    std::string text;
    if (value.is_string()) {
      text = value.get<std::string>();
    } else if (value.is_number() && !text_wanted) {
      text = value.dump();
    } else if (value.is_object() && key == "model") {
      text = value.dump();
    } else {
      throw Error(source + ": " + key + " is " + value.dump() + "; expected " +
                  (text_wanted ? "a string" : "a number"));
    }
    try {
      set_field(result, key, text);
    } catch (const Error& error) {
      throw Error(source + ": " + error.what());
    }
  }
  config = result;
}

void load_config(TrainConfig& config, const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Error(path + ": cannot be read; expected a training configuration (see configs/)");
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  parse_config(config, text, path);
}

std::string to_json(const TrainConfig& config) {
  TrainConfig copy = config;
  Json root = Json::object();
  for (const Field& field : fields(copy)) {
    std::visit(Overloaded{[&](std::string* value) {
                            const bool object = std::string_view(field.name) == "model" && value->starts_with("{");
                            root[field.name] = object ? Json::parse(*value) : Json(*value);
                          },
                          [&](auto* value) { root[field.name] = *value; }},
               field.value);
  }
  return root.dump(2) + "\n";
}

Schedule TrainConfig::schedule() const {
  const std::int64_t warmup = warmup_tokens >= 0 ? warmup_tokens : train_tokens / 50;
  return {initial_learning_rate, learning_rate, final_learning_rate, (warmup + batch_tokens - 1) / batch_tokens,
          total_steps()};
}

Device TrainConfig::resolved_device() const {
  if (device != "auto") return device_from_name(device);
  return cuda_device_count() > 0 ? Device::cuda() : Device::cpu();
}

std::size_t TrainConfig::memory_limit_bytes() const {
  try {
    if (memory_limit.empty()) return 0;
    const std::size_t bytes = parse_bytes(memory_limit);
    if (bytes == 0) throw Error("'" + memory_limit + "' leaves nothing; where there is to be no limit, leave it out");
    return bytes;
  } catch (const Error& error) {
    throw Error(std::string("training configuration: memory_limit: ") + error.what());
  }
}

void TrainConfig::validate() const {
  TrainConfig copy = *this;
  for (const Field& field : fields(copy)) {
    const auto* const* text = std::get_if<std::string*>(&field.value);
    require(text == nullptr || is_utf8(**text), field.name, "not UTF-8", "text in UTF-8, as train.json is");
  }
  const auto number = [](std::int64_t value) { return std::to_string(value); };
  require(!model.empty(), "model", "empty", "a preset's name or a path");
  require(!data.empty(), "data", "empty", "a folder made by `flashgla data prepare`, or a text file");
  require(!out.empty(), "out", "empty", "a folder for the run");
  require(train_tokens >= 0, "train_tokens", number(train_tokens), "0 (one pass over the data) or more");
  require(sequence_length >= 1, "sequence_length", number(sequence_length), "at least 1");
  require(batch_tokens >= sequence_length && batch_tokens % sequence_length == 0, "batch_tokens", number(batch_tokens),
          "a multiple of sequence_length (" + number(sequence_length) + ")");
  require(batch_tokens < (std::int64_t{1} << 31), "batch_tokens", number(batch_tokens), "less than 2^31");
  require(micro_batch >= 0 && (micro_batch == 0 || sequences_per_batch() % micro_batch == 0), "micro_batch",
          number(micro_batch),
          "a divisor of batch_tokens / sequence_length (" + number(sequences_per_batch()) + "), or 0");
  require(order == "automatic" || order == "packed" || order == "segments" || order == "windows" || order == "labelled",
          "order", "'" + order + "'", "automatic, packed, segments, windows or labelled");
  require(segments >= 0 && segments <= (std::int64_t{1} << 53) / sequence_length, "segments", number(segments),
          "0 (the whole data) or more, and fewer than 2^53 tokens with it");
  require(segments == 1 || order == "segments", "segments", number(segments), "1, or order 'segments' with it");
  require(learning_rate > 0.0, "learning_rate", text_of(learning_rate), "a positive number");
  require(initial_learning_rate >= 0.0 && initial_learning_rate <= learning_rate, "initial_learning_rate",
          text_of(initial_learning_rate), "between 0 and learning_rate (" + text_of(learning_rate) + ")");
  require(final_learning_rate >= 0.0 && final_learning_rate <= learning_rate, "final_learning_rate",
          text_of(final_learning_rate), "between 0 and learning_rate (" + text_of(learning_rate) + ")");
  require(warmup_tokens >= -1, "warmup_tokens", number(warmup_tokens), "0 or more, or -1 (automatic)");
  require(train_tokens == 0 || warmup_tokens <= train_tokens, "warmup_tokens", number(warmup_tokens),
          "at most train_tokens (" + number(train_tokens) + ")");
  // The update computes in f32.
  const auto require_decay = [](double beta, const char* name) {
    require(beta >= 0.0 && static_cast<float>(beta) < 1.0f, name, text_of(beta), "in [0, 1), at most 0.99999994");
  };
  require_decay(beta1, "beta1");
  require_decay(beta2, "beta2");
  require(epsilon >= static_cast<double>(FLT_MIN) && epsilon <= static_cast<double>(FLT_MAX), "epsilon",
          text_of(epsilon), "a positive f32, from 1.18e-38 on");
  require(weight_decay >= 0.0, "weight_decay", text_of(weight_decay), "0 or more");
  require(clip_norm >= 0.0, "clip_norm", text_of(clip_norm), "0 (off) or more");
  require(dropout >= 0.0 && dropout < 1.0, "dropout", text_of(dropout), "in [0, 1)");
  const auto require_own = [](double own, const char* name) {
    require(own == -1.0 || (own >= 0.0 && own < 1.0), name, text_of(own), "in [0, 1), or -1 (as dropout)");
  };
  require_own(embedding_dropout, "embedding_dropout");
  require_own(attention_dropout, "attention_dropout");
  require((dropout == 0.0 && embedding_dropout <= 0.0 && attention_dropout <= 0.0) || accumulation() <= 1 << 16,
          "micro_batch", number(micro_batch), "at most 65536 micro-batches a step with dropout");
  optimizer_state_from_name(optimizer_state);
  if (device != "auto") device_from_name(device);
  require(dtype == "automatic" || dtype == "f32" || dtype == "bf16", "dtype", "'" + dtype + "'",
          "automatic, f32 or bf16");
  memory_limit_bytes();
  require(recompute == "automatic" || recompute == "nothing" || recompute == "activations" || recompute == "block",
          "recompute", "'" + recompute + "'", "automatic, nothing, activations or block");
  require(graphs == "on" || graphs == "off", "graphs", "'" + graphs + "'", "on or off");
  require(threads >= 0 && threads <= kMostThreads, "threads", number(threads), "0 (all) .. " + number(kMostThreads));
  require(seed >= 0, "seed", number(seed), "0 or more");
  require(log_every >= 1, "log_every", number(log_every), "at least 1");
  require(evaluate_every >= 0, "evaluate_every", number(evaluate_every), "0 or more");
  require(evaluation_tokens >= 0, "evaluation_tokens", number(evaluation_tokens), "0 or more");
  require(checkpoint_every >= 0, "checkpoint_every", number(checkpoint_every), "0 or more");
  require(keep_checkpoints >= 1, "keep_checkpoints", number(keep_checkpoints), "at least 1");
  require(stop_accuracy >= 0.0 && stop_accuracy <= 1.0, "stop_accuracy", text_of(stop_accuracy),
          "between 0 (never) and 1");
  require(patience >= 0, "patience", number(patience), "0 (never) or more");
  require(max_skipped_updates >= 1, "max_skipped_updates", number(max_skipped_updates), "at least 1");
}

}  // namespace flashgla::train
