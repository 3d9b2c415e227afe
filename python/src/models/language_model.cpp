#include <nanobind/ndarray.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "bindings.h"
#include "flashgla/base/current_device.h"
#include "flashgla/base/memory.h"
#include "flashgla/base/names.h"
#include "flashgla/eval/evaluation.h"
#include "flashgla/generate/generator.h"
#include "flashgla/model/checkpoint.h"
#include "flashgla/train/run_folder.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace flashgla::python {
namespace {

// Asks Python for signals now and then while a call works without the GIL; Ctrl-C then ends the call.
class Interruption {
 public:
  bool keep_going() {
    const nb::gil_scoped_acquire held;
    interrupted_ = interrupted_ || PyErr_CheckSignals() != 0;
    return !interrupted_;
  }
  // Runs `work` without the GIL; what Ctrl-C raised comes before what it made the work throw.
  template <class Work>
  auto run(Work&& work) {
    try {
      const nb::gil_scoped_release released;
      return work();
    } catch (const Error&) {
      if (interrupted_) throw nb::python_error();
      throw;
    }
  }
  void raise_if_interrupted() {
    if (interrupted_) throw nb::python_error();
  }

 private:
  bool interrupted_ = false;
};

struct LoadedModel {
  std::string folder;
  Context context;
  std::unique_ptr<model::LanguageModel> model;
  std::shared_ptr<text::Tokenizer> tokenizer;  // null: none in the folder
  std::mutex mutex;                            // one call at a time

  LoadedModel(const std::string& path, const std::string& device, const std::optional<std::string>& dtype, int threads,
              const std::string& checkpoint)
      : folder(train::find_model_folder(path, checkpoint)), context(device_from_name(device), threads) {
    const CurrentDevice current(context.device());
    model::LoadOptions options;
    options.device = context.device();
    options.threads = threads;
    if (dtype) options.dtype = dtype_from_name(*dtype);
    model = model::load_model(folder, options);
    if (text::has_tokenizer(folder)) tokenizer = text::load_tokenizer(folder);
    if (tokenizer && tokenizer->vocab_size() > model->config().vocab_size) {
      throw Error("load: the tokenizer in " + folder + " has " + std::to_string(tokenizer->vocab_size()) +
                  " tokens; the model has a vocabulary of " + std::to_string(model->config().vocab_size));
    }
  }

  const text::Tokenizer& needed_tokenizer() const {
    if (!tokenizer) throw Error(folder + " has no tokenizer, which text needs; give token ids");
    return *tokenizer;
  }
};

using Model = std::shared_ptr<LoadedModel>;

// A call's turn to use a model, whose device is the current one as long.
class Turn {
 public:
  explicit Turn(LoadedModel& model) : busy_(model.mutex), current_(model.context.device()) {}

 private:
  std::lock_guard<std::mutex> busy_;
  CurrentDevice current_;
};

// A sequence in progress.
struct State {
  Model owner;
  generate::Session session;

  explicit State(const Model& model) : State(model, CurrentDevice(model->context.device())) {}

  std::unique_ptr<State> fork() const {
    const CurrentDevice current(owner->context.device());
    auto copy = std::make_unique<State>(owner);
    copy->session.state.reserve(session.state.capacity());
    copy->session.state.copy_sequence(0, session.state, 0);
    const auto copy_tensor = [](const TensorView& from, const TensorView& to) {
      copy_memory(to.data, to.device, from.data, from.device, from.bytes());
    };
    copy_tensor(session.logits, copy->session.logits);
    copy_tensor(session.seen, copy->session.seen);
    return copy;
  }
  void save(const std::string& path) const {
    const CurrentDevice current(owner->context.device());
    session.save(*owner->model, path);
  }
  void load(const std::string& path) {
    const CurrentDevice current(owner->context.device());
    session.load(*owner->model, path);
  }

 private:
  State(Model model, const CurrentDevice&) : owner(std::move(model)), session(*owner->model, 1) {}
};

generate::GenerateOptions options_of(std::int64_t max_tokens, double temperature, std::int64_t top_k, double top_p,
                                     double min_p, double repetition_penalty, std::uint64_t seed,
                                     std::vector<std::string> stop, bool stop_at_end) {
  generate::GenerateOptions options;
  options.sampling = {temperature, top_k, top_p, min_p, repetition_penalty, seed};
  options.sampling.validate();
  options.max_tokens = max_tokens;
  options.stop = std::move(stop);
  options.stop_at_end = stop_at_end;
  return options;
}

// Text as it is generated. Generator::generate runs in a thread of its own, which works only while next() waits:
// between two calls the model and the state are nobody's.
class Stream {
 public:
  Stream(std::shared_ptr<State> state, generate::GenerateOptions options)
      : state_(std::move(state)),
        options_(std::move(options)),
        context_(state_->owner->context.device(), state_->owner->context.threads()) {}
  ~Stream() { close(); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // The next piece of text; empty at the end.
  std::string next() {
    const std::lock_guard<std::mutex> busy(state_->owner->mutex);
    std::unique_lock<std::mutex> lock(mutex_);
    if (!started_) {
      started_ = true;
      thread_ = std::thread([this] { work(); });
    }
    if (text_.empty() && !ended_) {
      working_ = true;
      changed_.notify_all();
      changed_.wait(lock, [&] { return !working_; });
    }
    if (!text_.empty()) {
      std::string piece = std::move(text_.front());
      text_.pop_front();
      return piece;
    }
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
    return {};
  }

  void close() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closed_ = working_ = true;
      changed_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
  }

  const std::string& finish() const { return finish_; }
  std::int64_t tokens() const { return tokens_; }

 private:
  // Between tokens: gives way as soon as there is text to show. False: nobody wants more.
  bool go_on() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!text_.empty() && !closed_) {
      working_ = false;
      changed_.notify_all();
      changed_.wait(lock, [&] { return working_; });
    }
    return !closed_;
  }

  void work() {
    const CurrentDevice current(context_.device());
    try {
      options_.should_stop = [this] { return !go_on(); };
      LoadedModel& model = *state_->owner;
      const generate::Generator generator(context_, *model.model, model.needed_tokenizer());
      const auto results = generator.generate(state_->session, options_, [&](std::size_t, std::string_view text) {
        const std::lock_guard<std::mutex> lock(mutex_);
        text_.emplace_back(text);
      });
      finish_ = generate::name_of(results.front().finish);
      tokens_ = results.front().tokens;
    } catch (...) {
      error_ = std::current_exception();
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    ended_ = true;
    working_ = false;
    changed_.notify_all();
  }

  std::shared_ptr<State> state_;
  generate::GenerateOptions options_;
  Context context_;
  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool started_ = false, working_ = false, ended_ = false, closed_ = false;
  std::deque<std::string> text_;
  std::exception_ptr error_;
  std::string finish_;
  std::int64_t tokens_ = 0;
};

using Ids = text::TokenIds;
using Pairs = std::vector<std::pair<Ids, Ids>>;

nb::ndarray<nb::numpy, float, nb::ndim<2>> logits(LoadedModel& self, const Ids& ids) {
  auto* result = new Tensor();
  const nb::capsule owner(result, [](void* pointer) noexcept { delete static_cast<Tensor*>(pointer); });
  {
    const nb::gil_scoped_release released;
    const Turn turn(self);
    eval::Scorer scorer(self.context, *self.model);
    *result = scorer.logits(ids);
  }
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
  return {result->as<float>(),
          {static_cast<std::size_t>((*result)->size(0)), static_cast<std::size_t>((*result)->size(1))},
          owner};
}

std::pair<std::vector<std::pair<double, bool>>, std::int64_t> loglikelihood(LoadedModel& self, const Pairs& pairs,
                                                                            std::int64_t batch_tokens, bool reuse) {
  Interruption interruption;
  return interruption.run([&] {
    const Turn turn(self);
    std::vector<eval::Request> requests;
    for (const auto& [context, continuation] : pairs) requests.push_back({context, continuation});
    eval::Scorer scorer(self.context, *self.model, {batch_tokens, reuse});
    std::pair<std::vector<std::pair<double, bool>>, std::int64_t> result;
    for (const eval::Score& score : scorer.score(requests, [&](std::size_t) { return interruption.keep_going(); })) {
      result.first.emplace_back(score.log_likelihood, score.greedy);
    }
    result.second = scorer.tokens_read();
    return result;
  });
}

// Sum of log P of all tokens but the first of each document.
std::vector<double> rolling(LoadedModel& self, const std::vector<Ids>& documents, std::int64_t window,
                            std::int64_t stride, std::int64_t batch_tokens) {
  Interruption interruption;
  return interruption.run([&] {
    const Turn turn(self);
    eval::LossReader reader(self.context, *self.model);
    std::vector<double> sums(documents.size(), 0.0);
    std::vector<eval::LossReader::Piece> batch;
    std::vector<std::size_t> owners;
    std::int64_t tokens = 0;
    const auto flush = [&] {
      if (batch.empty()) return;
      const std::vector<double> losses = reader.windows(batch);
      for (std::size_t i = 0; i < losses.size(); ++i) sums[owners[i]] -= losses[i];
      batch.clear(), owners.clear();
      tokens = 0;
      if (!interruption.keep_going()) throw Error("loglikelihood_rolling: stopped");
    };
    for (std::size_t i = 0; i < documents.size(); ++i) {
      for (const std::int32_t id : documents[i]) {
        if (id < 0 || id >= self.model->config().vocab_size) {
          throw Error("loglikelihood_rolling", "token", "is " + std::to_string(id),
                      "0 .. " + std::to_string(self.model->config().vocab_size - 1));
        }
      }
      for (const eval::Window& each :
           eval::windows_of(static_cast<std::int64_t>(documents[i].size()), window, stride)) {
        if (tokens + each.end - each.begin > batch_tokens) flush();
        batch.push_back({documents[i], each});
        owners.push_back(i);
        tokens += each.end - each.begin;
      }
    }
    flush();
    return sums;
  });
}

struct Generated {
  std::string text;
  std::int64_t tokens;
  std::string finish;
};

std::vector<Generated> generate_texts(LoadedModel& self, const std::vector<Ids>& prompts,
                                      generate::GenerateOptions options) {
  Interruption interruption;
  std::vector<Generated> generated = interruption.run([&] {
    const Turn turn(self);
    const generate::Generator generator(self.context, *self.model, self.needed_tokenizer());
    generate::Session session(*self.model, static_cast<std::int64_t>(prompts.size()));
    generator.feed(session, prompts);
    options.should_stop = [&] { return !interruption.keep_going(); };
    std::vector<Generated> texts(prompts.size());
    const auto results =
        generator.generate(session, options, [&](std::size_t i, std::string_view text) { texts[i].text += text; });
    for (std::size_t i = 0; i < texts.size(); ++i) {
      texts[i].tokens = results[i].tokens;
      texts[i].finish = generate::name_of(results[i].finish);
    }
    return texts;
  });
  interruption.raise_if_interrupted();
  return generated;
}

// In pieces, between which Ctrl-C may end it; the state then has seen those before.
void feed(State& self, const Ids& ids) {
  constexpr std::size_t kPiece = 16384;
  Interruption interruption;
  interruption.run([&] {
    const Turn turn(*self.owner);
    const generate::Generator generator(self.owner->context, *self.owner->model, self.owner->needed_tokenizer());
    for (std::size_t begin = 0; begin == 0 || begin < ids.size(); begin += kPiece) {
      if (begin > 0 && !interruption.keep_going()) throw Error("feed: stopped");
      const auto from = ids.begin() + static_cast<std::ptrdiff_t>(begin);
      generator.feed(self.session,
                     {Ids(from, from + static_cast<std::ptrdiff_t>(std::min(kPiece, ids.size() - begin)))});
    }
  });
}

}  // namespace

void bind_language_model(nb::module_& m) {
  nb::class_<LoadedModel>(m, "Model", "A language model and its tokenizer; flashgla.LanguageModel is its public face.")
      .def_static(
          "load",
          [](const std::string& folder, const std::string& device, const std::optional<std::string>& dtype, int threads,
             const std::string& checkpoint) {
            const nb::gil_scoped_release released;
            return std::make_shared<LoadedModel>(folder, device, dtype, threads, checkpoint);
          },
          "folder"_a, "device"_a, "dtype"_a.none(), "threads"_a, "checkpoint"_a)
      .def_ro("folder", &LoadedModel::folder)
      .def_prop_ro("config", [](const LoadedModel& self) { return model::to_json(self.model->config()); })
      .def_prop_ro("vocab_size", [](const LoadedModel& self) { return self.model->config().vocab_size; })
      .def_prop_ro("max_length", [](const LoadedModel& self) { return self.model->config().max_position_embeddings; })
      .def_prop_ro("dtype", [](const LoadedModel& self) { return std::string(name_of(self.model->dtype())); })
      .def_prop_ro("device", [](const LoadedModel& self) { return name_of(self.model->device()); })
      .def_prop_ro("fingerprint",
                   [](const LoadedModel& self) {
                     const CurrentDevice current(self.context.device());
                     return model::fingerprint(*self.model);
                   })
      .def_ro("tokenizer", &LoadedModel::tokenizer)
      .def("prefix_token", [](const LoadedModel& self) { return eval::prefix_token(self.needed_tokenizer()); })
      .def(
          "encode_pair",
          [](const LoadedModel& self, const std::string& context, const std::string& continuation,
             std::int64_t longest) {
            const eval::Request request = eval::encode_pair(self.needed_tokenizer(), context, continuation, longest);
            return std::pair(request.context, request.continuation);
          },
          "context"_a, "continuation"_a, "longest"_a)
      .def("logits", &logits, "ids"_a)
      .def("loglikelihood", &loglikelihood, "pairs"_a, "batch_tokens"_a, "reuse_prefixes"_a)
      .def("rolling", &rolling, "documents"_a, "window"_a, "stride"_a, "batch_tokens"_a)
      .def("encode_prompt",
           [](LoadedModel& self, const std::string& text, bool begins) {
             return generate::Generator(self.context, *self.model, self.needed_tokenizer()).encode(text, begins);
           })
      .def("generate", &generate_texts, "prompts"_a, "options"_a);
  nb::class_<generate::GenerateOptions>(m, "GenerateOptions")
      .def(
          "__init__",
          [](generate::GenerateOptions* self, std::int64_t max_tokens, double temperature, std::int64_t top_k,
             double top_p, double min_p, double repetition_penalty, std::uint64_t seed, std::vector<std::string> stop,
             bool stop_at_end) {
            new (self) generate::GenerateOptions(options_of(max_tokens, temperature, top_k, top_p, min_p,
                                                            repetition_penalty, seed, std::move(stop), stop_at_end));
          },
          "max_tokens"_a, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "repetition_penalty"_a, "seed"_a, "stop"_a,
          "stop_at_end"_a);
  nb::class_<Generated>(m, "Generated")
      .def_ro("text", &Generated::text)
      .def_ro("tokens", &Generated::tokens)
      .def_ro("finish", &Generated::finish);
  nb::class_<State>(m, "State", "A sequence in progress.")
      .def(nb::init<const Model&>(), "model"_a)
      .def_prop_ro("tokens", [](const State& self) { return self.session.state.history[0].tokens; })
      .def("feed", &feed, "ids"_a)
      .def("fork", &State::fork)
      .def("save", &State::save)
      .def("load", &State::load);
  nb::class_<Stream>(m, "Stream", "Text as it is generated.")
      .def(nb::init<std::shared_ptr<State>, generate::GenerateOptions>(), "state"_a, "options"_a)
      .def("next", &Stream::next, nb::call_guard<nb::gil_scoped_release>())
      .def("close", &Stream::close, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("finish", &Stream::finish)
      .def_prop_ro("tokens", &Stream::tokens);
}

}  // namespace flashgla::python
