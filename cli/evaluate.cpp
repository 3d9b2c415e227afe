// flashgla evaluate: loss and perplexity, scores of continuations and choices, loss by position.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>

#include "cli/checks.h"
#include "cli/gnuplot.h"
#include "cli/interruption.h"
#include "cli/model_flags.h"
#include "cli/progress.h"
#include "cli/say.h"
#include "cli/verbs.h"
#include "flashgla/base/error.h"
#include "flashgla/base/file.h"
#include "flashgla/base/json.h"
#include "flashgla/base/names.h"
#include "flashgla/data/dataset.h"
#include "flashgla/eval/divergence.h"
#include "flashgla/eval/evaluation.h"
#include "flashgla/eval/recall.h"
#include "flashgla/model/checkpoint.h"
#include "flashgla/text/fingerprint.h"
#include "flashgla/train/run_folder.h"

namespace flashgla::cli {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

struct EvaluateArguments {
  std::vector<std::string> models;
  ModelFlags flags;
  std::string data;
  std::string text_field = "text";
  std::string part = "validation";
  std::string tokenizer;
  std::int64_t window = 0, stride = 0;
  bool carry = false;
  std::int64_t extrapolate = 0, bucket = 2048, sequences = 0;
  std::int64_t limit = 0;
  std::int64_t batch_tokens = 8192;
  bool no_reuse = false;
  std::string png, log;
  bool resume = false;
  std::int64_t divergence = 0;
  bool json = false, quiet = false, samples = false;
};

// What all models are evaluated on.
struct Data {
  eval::DataKind kind;
  std::vector<eval::Example> examples;
  // Documents as text, to be encoded by each model's tokenizer, or as tokens.
  std::vector<std::string> texts;
  std::optional<data::Dataset> tokens;
  data::TokenSpan span;  // of the tokens
};

Data open_data(const EvaluateArguments& arguments) {
  Data data{eval::kind_of(arguments.data), {}, {}, {}, {}};
  const auto limit = [&](auto& list) {
    if (arguments.limit > 0 && list.size() > static_cast<std::size_t>(arguments.limit)) {
      list.resize(static_cast<std::size_t>(arguments.limit));
    }
  };
  switch (data.kind) {
    case eval::DataKind::text:
      data.texts = {read_file(arguments.data)};
      if (data.texts[0].empty()) throw Error(arguments.data + ": there is nothing in it");
      break;
    case eval::DataKind::documents:
      data.texts = eval::read_documents(arguments.data, arguments.text_field);
      limit(data.texts);
      break;
    case eval::DataKind::examples:
      data.examples = eval::read_examples(arguments.data);
      limit(data.examples);
      break;
    case eval::DataKind::tokens: {
      data::OpenOptions options;
      options.tokenizer = arguments.tokenizer;
      data.tokens = data::open_dataset(arguments.data, options);
      const bool validation = arguments.part == "validation" && data.tokens->validation.file != nullptr;
      data.span = validation ? data.tokens->validation : data.tokens->train;
      break;
    }
  }
  return data;
}

std::vector<eval::Document> documents_of(const EvaluateArguments& arguments, const Data& data,
                                         const text::Tokenizer* tokenizer) {
  std::vector<eval::Document> documents;
  if (!data.tokens) {
    for (const std::string& text : data.texts) documents.push_back(eval::document_of(*tokenizer, text));
    return documents;
  }
  const std::vector<std::int64_t> begins = data.span.document_begins();
  for (std::size_t i = 0; i + 1 < begins.size(); ++i) {
    if (arguments.limit > 0 && static_cast<std::int64_t>(i) == arguments.limit) break;
    eval::Document& document = documents.emplace_back();
    document.tokens.resize(static_cast<std::size_t>(begins[i + 1] - begins[i]));
    data.span.file->read(data.span.begin + begins[i], begins[i + 1] - begins[i], document.tokens.data());
    if (tokenizer == nullptr) continue;
    const std::string text = tokenizer->decode(document.tokens);
    document.bytes = static_cast<std::int64_t>(text.size());
    document.words = eval::count_words(text);
  }
  return documents;
}

std::string label_of(const std::string& model) {
  std::string name = fs::path(model).lexically_normal().filename().string();
  if (name.empty()) name = fs::path(model).lexically_normal().parent_path().filename().string();
  return name.empty() ? model : name;
}

// Hash of what is evaluated on, wherever it lies.
std::string fingerprint_of(const EvaluateArguments& arguments, const Data& data) {
  if (!data.tokens) return text::fingerprint_of(read_file(arguments.data));
  constexpr std::int64_t kPiece = std::int64_t{1} << 20;
  std::string print;
  std::vector<std::int32_t> piece;
  for (std::int64_t begin = 0; begin < data.span.size(); begin += kPiece) {
    piece.resize(static_cast<std::size_t>(std::min(kPiece, data.span.size() - begin)));
    data.span.file->read(data.span.begin + begin, static_cast<std::int64_t>(piece.size()), piece.data());
    print += std::string(reinterpret_cast<const char*>(piece.data()), piece.size() * sizeof(piece[0]));
    print = text::fingerprint_of(print);
  }
  return print;
}

// A model to evaluate.
struct Subject {
  std::string label, folder;
  model::ModelConfig config;
  std::shared_ptr<const text::Tokenizer> tokenizer;
};

// Everything that decides about the numbers, so that a log is not taken for another evaluation's. Models, tokenizers
// and data by what they hold: a run that trained on is another model, a folder that was moved is not.
std::string settings_of(const EvaluateArguments& arguments, const Data& data, std::span<const Subject> subjects) {
  Json models = Json::array(), tokenizers = Json::array();
  for (const Subject& subject : subjects) {
    models.push_back(model::stored_fingerprint(subject.folder));
    tokenizers.push_back(subject.tokenizer ? subject.tokenizer->fingerprint() : "none");
  }
  return json_text(Json{{"model", models},
                        {"tokenizer", tokenizers},
                        {"data", fingerprint_of(arguments, data)},
                        {"text_field", arguments.text_field},
                        {"part", arguments.part},
                        {"window", arguments.window},
                        {"stride", arguments.stride},
                        {"carry", arguments.carry},
                        {"extrapolate", arguments.extrapolate},
                        {"bucket", arguments.bucket},
                        {"sequences", arguments.sequences},
                        {"limit", arguments.limit},
                        {"batch_tokens", arguments.batch_tokens},
                        {"reuse", !arguments.no_reuse},
                        {"dtype", arguments.flags.dtype},
                        {"device", name_of(device_from_name(arguments.flags.device))}});
}

Json loss_row(const eval::LossResult& result) {
  const double mean = result.loss / static_cast<double>(result.tokens);
  Json row = {
      {"tokens", result.tokens}, {"documents", result.documents}, {"loss", mean}, {"perplexity", std::exp(mean)}};
  if (result.complete && result.words > 0) {
    row["word_perplexity"] = std::exp(result.loss / static_cast<double>(result.words));
    row["words"] = result.words;
  }
  if (result.complete && result.bytes > 0) {
    row["byte_perplexity"] = std::exp(result.loss / static_cast<double>(result.bytes));
    row["bits_per_byte"] = result.loss / static_cast<double>(result.bytes) / std::log(2.0);
    row["bytes"] = result.bytes;
  }
  return row;
}

Json recall_row(const eval::RecallResult& result) {
  const auto answers = static_cast<double>(result.answers);
  return {{"sequences", result.sequences},
          {"answers", result.answers},
          {"accuracy", static_cast<double>(result.right) / answers},
          {"loss", result.loss / answers}};
}

Json example_row(const std::vector<eval::Example>& examples, const eval::ExampleResult& result, bool samples) {
  const auto share = [&](std::int64_t right) { return static_cast<double>(right) / static_cast<double>(result.done); };
  Json row = {{"examples", result.done}};
  if (examples.front().answer) {
    row["acc"] = share(result.acc);
    row["acc_norm"] = share(result.acc_norm);
    row["acc_bytes"] = share(result.acc_bytes);
  } else {
    row["acc"] = share(result.greedy);
    row["perplexity"] = std::exp(-result.log_likelihood / static_cast<double>(result.done));
    row["log_likelihood"] = result.log_likelihood;
  }
  row["tokens_read"] = result.tokens_read;
  for (std::size_t i = 0; samples && i < result.scores.size(); ++i) {
    Json each = {{"log_likelihoods", Json::array()}, {"greedy", Json::array()}};
    for (const eval::Score& score : result.scores[i]) {
      each["log_likelihoods"].push_back(score.log_likelihood);
      each["greedy"].push_back(score.greedy);
    }
    row["samples"].push_back(each);
  }
  return row;
}

Json position_row(const EvaluateArguments& arguments, const eval::PositionResult& result) {
  Json buckets = Json::array();
  for (std::size_t i = 0; i < result.losses.size(); ++i) {
    const auto begin = static_cast<std::int64_t>(i) * arguments.bucket;
    buckets.push_back({{"begin", begin},
                       {"end", std::min(begin + arguments.bucket, arguments.extrapolate)},
                       {"loss", result.losses[i]},
                       {"perplexity", std::exp(result.losses[i])}});
  }
  return {{"sequences", result.sequences}, {"positions", buckets}};
}

void draw(const EvaluateArguments& arguments, const Json& rows) {
  draw_picture(arguments.png, [&](const std::string& file) {
    std::string script =
        gnuplot_png(file) + "set xlabel 'position (tokens)'\nset ylabel 'perplexity'\nset key top right\n";
    for (std::size_t i = 0; i < rows.size(); ++i) {
      script += fmt::format("$curve{} << EOD\n", i);
      for (const auto& bucket : rows[i]["positions"]) {
        const double middle = (bucket["begin"].get<double>() + bucket["end"].get<double>()) / 2.0;
        script += fmt::format("{:.10g} {:.10g}\n", middle, bucket["perplexity"].get<double>());
      }
      script += "EOD\n";
    }
    script += "plot ";
    for (std::size_t i = 0; i < rows.size(); ++i) {
      script += fmt::format("{}$curve{} with linespoints pt 7 ps 0.8 lw 2 title {}", i == 0 ? "" : ", ", i,
                            gnuplot_string(rows[i]["model"].get<std::string>()));
    }
    return script + "\n";
  });
}

void print_row(const Json& row) {
  print("{}\n", row["model"].get<std::string>());
  for (const auto& [key, value] : row.items()) {
    if (key == "model" || key == "samples") continue;
    if (key == "positions") {
      for (const auto& bucket : value) {
        print("  {:>7} .. {:<7} loss {:.4f}  perplexity {:.3f}\n", bucket["begin"].get<std::int64_t>(),
              bucket["end"].get<std::int64_t>(), bucket["loss"].get<double>(), bucket["perplexity"].get<double>());
      }
    } else if (value.is_number_float()) {
      print("  {:<16} {:.4f}{}\n", key, value.get<double>(), key == "loss" ? " nats a token" : "");
    } else {
      print("  {:<16} {}\n", key, value.dump());
    }
  }
}

std::shared_ptr<const text::Tokenizer> tokenizer_of(const EvaluateArguments& arguments, const Data& data,
                                                    const std::string& folder, const model::ModelConfig& config) {
  std::shared_ptr<const text::Tokenizer> tokenizer;
  if (!arguments.tokenizer.empty()) {
    tokenizer = text::load_tokenizer(arguments.tokenizer);
  } else if (text::has_tokenizer(folder)) {
    tokenizer = text::load_tokenizer(folder);
  }
  if (data.tokens) {
    if (tokenizer) data::require_same_tokenizer(*data.tokens, *tokenizer, arguments.data);
    if (!tokenizer) tokenizer = data.tokens->tokenizer;
    if (data.tokens->vocab_size > config.vocab_size) {
      throw Error(fmt::format("{} has tokens up to {}, but {} has a vocabulary of {}", arguments.data,
                              data.tokens->vocab_size - 1, folder, config.vocab_size));
    }
  } else if (!tokenizer) {
    throw Error(folder + " has no tokenizer, which text needs; --tokenizer names one");
  }
  if (tokenizer && tokenizer->vocab_size() > config.vocab_size) {
    throw Error(fmt::format("the tokenizer has {} tokens, {} has a vocabulary of {}; they do not belong together",
                            tokenizer->vocab_size(), folder, config.vocab_size));
  }
  return tokenizer;
}

// All of them, so that a mistake about the last one is told before the first is evaluated.
std::vector<Subject> subjects_of(const EvaluateArguments& arguments, const Data& data) {
  std::vector<Subject> subjects;
  for (const std::string& name : arguments.models) {
    Subject& subject = subjects.emplace_back();
    subject.label = label_of(name);
    subject.folder = train::find_model_folder(name, arguments.flags.checkpoint);
    subject.config = model::load_config((fs::path(subject.folder) / "config.json").string());
    subject.tokenizer = tokenizer_of(arguments, data, subject.folder, subject.config);
  }
  return subjects;
}

void run_evaluate(const EvaluateArguments& arguments) {
  if (arguments.carry && arguments.stride > 0) throw Error("evaluate: --carry has no windows that --stride could move");
  if (!arguments.png.empty() && arguments.extrapolate == 0) throw Error("evaluate: --png goes with --extrapolate");
  if (!arguments.png.empty()) require_drawable(arguments.png);
  const Data data = open_data(arguments);
  const bool examples = data.kind == eval::DataKind::examples;
  if (examples && (arguments.extrapolate > 0 || arguments.carry || arguments.stride > 0)) {
    throw Error("evaluate: " + arguments.data + " has examples; --extrapolate, --carry and --stride are for text");
  }
  const bool task = data.tokens && data.span.labels;
  if (task && (arguments.extrapolate > 0 || arguments.carry || arguments.stride > 0 || arguments.window > 0)) {
    throw Error("evaluate: " + arguments.data +
                " is a task; --extrapolate, --carry, --stride and --window are for text");
  }
  if (arguments.divergence > 0 && (examples || task || arguments.extrapolate > 0 || arguments.models.size() < 2)) {
    throw Error("evaluate: --kl compares models with the first one on text: name two or more, without --extrapolate");
  }
  Context context(arguments.flags.chosen_device(), arguments.flags.threads);
  if (arguments.divergence > 0 && context.device() != Device::cpu()) {
    throw Error("evaluate: --kl compares on the CPU alone; --device cpu chooses it");
  }
  const model::LoadOptions load = arguments.flags.load_options(context.device());
  const std::vector<Subject> subjects = subjects_of(arguments, data);
  eval::JobLog log(arguments.log, arguments.log.empty() ? "{}" : settings_of(arguments, data, subjects),
                   arguments.resume);
  if (log.taken() > 0 && !arguments.quiet) say("{}: {} jobs are done already\n", arguments.log, log.taken());

  const InterruptionScope signals({.first = "\nflashgla: finishing the job; once more to stop at once\n"});

  const std::string state_file = arguments.log.empty() ? std::string() : arguments.log + ".state";
  Json rows = Json::array();
  std::int64_t jobs = 0;
  std::shared_ptr<model::LanguageModel> first;
  for (const Subject& subject : subjects) {
    if (interrupted()) break;
    const std::shared_ptr<model::LanguageModel> model = model::load_model(subject.folder, load);
    const model::ModelConfig& config = model->config();
    const std::int64_t whole = std::min(config.max_position_embeddings, config.most_tokens().count);
    const std::int64_t window = arguments.window > 0 ? arguments.window : whole;
    std::unique_ptr<Progress> bar;
    std::string figure_name = examples || task ? "acc" : "loss";
    const eval::Monitor monitor = [&](std::int64_t done, std::int64_t total, double figure) {
      if (!bar) bar = std::make_unique<Progress>(subject.label, total, arguments.quiet);
      bar->update(done, fmt::format("{} {:.4f}", figure_name, figure));
      return !interrupted();
    };
    const eval::Work work{context, *model, log, jobs, monitor, state_file, subject.folder};
    Json row = {{"model", subject.label}};
    bool complete = true;
    if (examples) {
      eval::ExampleOptions options{window, {arguments.batch_tokens, !arguments.no_reuse}};
      const auto result = eval::evaluate_examples(work, *subject.tokenizer, data.examples, options);
      row.update(example_row(data.examples, result, arguments.samples));
      jobs += result.jobs, complete = result.complete;
    } else if (task) {
      const auto result = eval::evaluate_recall(work, data.span, {arguments.limit, arguments.batch_tokens});
      row.update(recall_row(result));
      jobs += result.jobs, complete = result.complete;
    } else if (arguments.extrapolate > 0) {
      const auto documents = documents_of(arguments, data, subject.tokenizer.get());
      const auto result = eval::evaluate_positions(
          work, documents, {arguments.extrapolate, arguments.bucket, window, arguments.sequences});
      row.update(position_row(arguments, result));
      jobs += result.jobs, complete = result.complete;
    } else {
      const auto documents = documents_of(arguments, data, subject.tokenizer.get());
      const std::int64_t stride = arguments.stride > 0 ? arguments.stride : window;
      const auto result =
          eval::evaluate_loss(work, documents, {window, stride, arguments.carry, arguments.batch_tokens});
      row.update(loss_row(result));
      row["window"] = window;
      jobs += result.jobs, complete = result.complete;
      if (first && complete) {
        bar.reset();
        figure_name = "kl";
        const auto kl = eval::divergence(context, *first, *model, documents, window, arguments.divergence, monitor);
        row["kl"] = kl.mean;
        complete = kl.complete;
      }
    }
    if (arguments.divergence > 0 && !first) first = model;
    bar.reset();
    if (!complete) row["complete"] = false;
    rows.push_back(row);
  }
  if (arguments.json) {
    const bool one = rows.size() == 1 && arguments.models.size() == 1;
    print("{}\n", json_text(one ? rows[0] : rows, 2));
  } else {
    for (const Json& row : rows) print_row(row);
  }
  std::fflush(stdout);
  if (interrupted() && (rows.empty() || rows.size() < subjects.size() || rows.back().contains("complete"))) {
    say("flashgla: interrupted; {}\n", arguments.log.empty() ? "--log keeps results, and --resume goes on from them"
                                                             : "the same with --resume goes on from " + arguments.log);
    throw CLI::RuntimeError(kInterruptedCode);
  }
  if (!state_file.empty()) fs::remove(state_file);
  if (!arguments.png.empty()) draw(arguments, rows);
}

}  // namespace

void add_evaluate(CLI::App& app) {
  auto arguments = std::make_shared<EvaluateArguments>();
  CLI::App* verb = app.add_subcommand(
      "evaluate",
      "Measures models: loss, perplexity and bits per byte on text; on JSON lines of {\"context\", \"continuation\"} "
      "or\n"
      "{\"context\", \"choices\", \"answer\"} what lm-evaluation-harness scores; on a task of `flashgla data mqar` the "
      "share of\n"
      "right answers; with --extrapolate the loss by position.\n"
      "\n"
      "  flashgla evaluate runs/first --data book.txt\n"
      "  flashgla evaluate runs/first --data task.jsonl --json\n"
      "  flashgla evaluate runs/a runs/b --data books --extrapolate 28672 --bucket 2048 --png figure5.png");
  verb->add_option("models", arguments->models, "Model folders, or run folders of flashgla train")->required();
  verb->add_option("--data", arguments->data,
                   "A text; JSON lines of documents or examples; tokens of `flashgla data prepare` or a .bin file")
      ->required();
  verb->add_option("--part", arguments->part, "Of prepared tokens (train, where there is no validation)")
      ->capture_default_str()
      ->check(CLI::IsMember(std::vector<std::string>{"validation", "train"}));
  verb->add_option("--text-field", arguments->text_field, "Of JSON lines of documents")->capture_default_str();
  verb->add_option("--tokenizer", arguments->tokenizer, "Folder or file, where the model's folder has none");
  verb->add_option("--limit", arguments->limit, "Only so many documents, examples or a task's sequences; 0: all")
      ->capture_default_str()
      ->transform(count_or_zero());
  verb->add_option("--window", arguments->window,
                   "Tokens read at once; contexts of examples are cut to it; 0: the model's max_position_embeddings, "
                   "or fewer where its sequences end before")
      ->capture_default_str()
      ->transform(count_or_zero())
      ->group("Windows");
  verb->add_option("--stride", arguments->stride,
                   "Tokens by which windows advance; 0: the window, with one token before it")
      ->capture_default_str()
      ->transform(count_or_zero())
      ->group("Windows");
  verb->add_option(
          "--kl", arguments->divergence,
          "Of several models: the mean KL divergence (nats) of each one's predictions from the first one's, on "
          "so many tokens; on the CPU")
      ->transform(count_or_zero());
  verb->add_flag("--carry", arguments->carry, "Each document in one pass, the state carried from window to window")
      ->group("Windows");
  verb->add_option("--extrapolate", arguments->extrapolate, "Loss by position in sequences of this many tokens")
      ->transform(positive_count())
      ->group("Length");
  verb->add_option("--bucket", arguments->bucket, "Positions that one figure is the mean of")
      ->capture_default_str()
      ->transform(positive_count())
      ->group("Length");
  verb->add_option("--sequences", arguments->sequences,
                   "Sequences at most, spread over the data; 0: all that there are")
      ->capture_default_str()
      ->transform(count_or_zero())
      ->group("Length");
  verb->add_option("--png", arguments->png, "A picture of the curves")->group("Length");
  verb->add_option("--batch-tokens", arguments->batch_tokens, "Tokens in one call of the model")
      ->capture_default_str()
      ->transform(positive_count());
  verb->add_flag("--no-reuse", arguments->no_reuse, "Read the context anew for each of its choices");
  verb->add_option("--log", arguments->log, "Keep results in this file as they come");
  verb->add_flag("--resume", arguments->resume, "Go on from the results in --log");
  auto* json = verb->add_flag("--json", arguments->json, "Print JSON");
  verb->add_flag("--samples", arguments->samples, "With --json: the scores of every example")->needs(json);
  verb->add_flag("--quiet", arguments->quiet, "No progress");
  arguments->flags.add_to(*verb);
  verb->callback([arguments] {
    try {
      run_evaluate(*arguments);
    } catch (const Json::exception& error) {
      if (!arguments->resume) throw;
      throw Error(arguments->log + ": a result in it is damaged: " + json_reason(error) + "; remove it to begin anew");
    }
  });
}

}  // namespace flashgla::cli
