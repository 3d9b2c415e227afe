// flashgla data: make a corpus (stories) or a task (mqar), turn text into tokens (prepare), look into token files
// (info).
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cli/checks.h"
#include "cli/command.h"
#include "cli/interruption.h"
#include "cli/progress.h"
#include "cli/say.h"
#include "cli/verbs.h"
#include "flashgla/base/error.h"
#include "flashgla/base/json.h"
#include "flashgla/data/dataset.h"
#include "flashgla/data/prepare.h"
#include "flashgla/data/recall.h"
#include "flashgla/data/stories.h"

namespace flashgla::cli {

namespace {

// A library callback that draws a progress line of bytes, begun at the first report, with the rate as its figure.
class ByteProgress {
 public:
  ByteProgress(std::string label, bool quiet) : label_(std::move(label)), quiet_(quiet) {}

  void operator()(std::int64_t done, std::int64_t total) {
    if (interrupted()) {  // nothing half-written stays behind
      progress_.reset();
      throw Error("interrupted; nothing was written");
    }
    if (!progress_) {
      progress_.emplace(label_, total, quiet_);
      start_ = std::chrono::steady_clock::now();
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    std::string figures = format_bytes(static_cast<double>(done));
    if (seconds > 0.05) figures += "  " + format_bytes(static_cast<double>(done) / seconds) + "/s";
    progress_->update(done, figures);
  }
  void end() { progress_.reset(); }

 private:
  std::string label_;
  bool quiet_;
  // A wait for standard input ends, too; training a tokenizer does not.
  InterruptionScope signals_{{.first = "\nflashgla: stopping; once more to stop at once\n", .restart = false}};
  std::optional<Progress> progress_;
  std::chrono::steady_clock::time_point start_;
};

struct StoriesArguments {
  data::StoriesOptions options;
  bool quiet = false;
  bool json = false;
};

void run_stories(StoriesArguments& arguments) {
  ByteProgress progress("stories", arguments.quiet);
  arguments.options.progress = std::ref(progress);
  const data::StoriesReport report = data::write_stories(arguments.options);
  progress.end();
  if (arguments.json) {
    const nlohmann::ordered_json json = {{"out", arguments.options.out},
                                         {"documents", report.documents},
                                         {"text_bytes", report.text_bytes},
                                         {"entropy_bits_per_byte", report.entropy_bits_per_byte},
                                         {"realised_bits_per_byte", report.realised_bits_per_byte},
                                         {"standard_error", report.standard_error}};
    print("{}\n", json_text(json, 2));
    return;
  }
  print("{}: {} stories, {} of text, seed {}\n", arguments.options.out, report.documents,
        format_bytes(static_cast<double>(report.text_bytes)), arguments.options.seed);
  print("true entropy {:.5f} bits per byte; of this corpus {:.5f} (standard error {:.5f}); in {}\n",
        report.entropy_bits_per_byte, report.realised_bits_per_byte, report.standard_error, report.figures_file);
  const std::string tokens = arguments.options.out.substr(0, arguments.options.out.size() - 6);
  print("next: {}\n", command({"data", "prepare", arguments.options.out, "--out", tokens}));
}

struct RecallArguments {
  data::RecallOptions options;
  bool quiet = false;
};

void run_recall(RecallArguments& arguments) {
  const InterruptionScope signals;
  std::optional<Progress> progress;
  progress.emplace("mqar", arguments.options.train + arguments.options.validation, arguments.quiet);
  arguments.options.progress = [&](std::int64_t done, std::int64_t) {
    if (interrupted()) {  // nothing half-written stays behind
      progress.reset();
      throw Error("interrupted; nothing was written");
    }
    progress->update(done, "sequences");
  };
  data::write_recall(arguments.options);
  progress.reset();
  const data::RecallOptions& made = arguments.options;
  print("{}: {} sequences for training, {} for validation: {} tokens, {} pairs of {} words, seed {}\n", made.out,
        made.train, made.validation, made.length, made.pairs, made.vocabulary, made.seed);
  print("next: {}\n", command({"train", "--data", made.out, "--length", std::to_string(made.length), "--out", "RUN"}));
}

struct PrepareArguments {
  data::PrepareOptions options;
  bool quiet = false;
  bool json = false;
};

nlohmann::ordered_json to_json(const data::PreparedPart& part) {
  return {{"tokens", part.tokens}, {"documents", part.documents}, {"text_bytes", part.text_bytes}};
}

void run_prepare(PrepareArguments& arguments) {
  data::PrepareOptions& options = arguments.options;
  for (const char* name : {"config.json", "checkpoints"}) {  // its tokenizer would be written over
    if (std::error_code ignored; std::filesystem::exists(std::filesystem::path(options.out) / name, ignored)) {
      throw Error("prepare: --out " + options.out + " is the folder of a model or a run; name another one");
    }
  }
  options.separator = unescaped(options.separator);
  if (!arguments.quiet && options.tokenizer.starts_with("train")) {
    say("training the tokenizer {} first\n", options.tokenizer);
  }
  if (!arguments.quiet && data::is_prepared(options.out)) {
    say("replacing the prepared data in {}\n", options.out);
  }
  ByteProgress progress("prepare", arguments.quiet);
  options.progress = std::ref(progress);
  const data::PrepareReport report = data::prepare(options);
  progress.end();
  if (arguments.json) {
    const nlohmann::ordered_json json = {{"out", options.out},
                                         {"tokenizer", report.tokenizer_kind},
                                         {"vocab_size", report.vocab_size},
                                         {"train", to_json(report.train)},
                                         {"validation", to_json(report.validation)},
                                         {"files_passed_over", report.passed_over}};
    print("{}\n", json_text(json, 2));
    return;
  }
  const auto show = [](const char* name, const data::PreparedPart& part) {
    print("{:<11} {:>8} tokens  {:>8} documents  {:>9} of text  {:.3f} bytes per token\n", name,
          format_count(static_cast<double>(part.tokens)), format_count(static_cast<double>(part.documents)),
          format_bytes(static_cast<double>(part.text_bytes)),
          static_cast<double>(part.text_bytes) / static_cast<double>(std::max<std::int64_t>(1, part.tokens)));
  };
  show("train", report.train);
  if (report.validation.tokens > 0) show("validation", report.validation);
  print("tokenizer   {}, {} words\n", report.tokenizer_kind, report.vocab_size);
  if (report.passed_over > 0) print("passed over {} files that are no text, or prepared data\n", report.passed_over);
  print("next: {}\n", command({"train", "--data", options.out, "--out", "RUN"}));
}

struct DataInfoArguments {
  std::string path;
  data::OpenOptions options;
  std::string format = "auto";
  std::int64_t first = 64;
  bool json = false;
};

// Control characters as escapes, so that a line stays a line.
std::string visible(const std::string& text) {
  std::string shown;
  for (const char c : text) {
    if (c == '\n') {
      shown += "\\n";
    } else if (c == '\t') {
      shown += "\\t";
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) {
      shown += fmt::format("\\x{:02X}", static_cast<unsigned char>(c));
    } else {
      shown += c;
    }
  }
  return shown;
}

void run_info(DataInfoArguments& arguments) {
  arguments.options.format = data::token_format_from_name(arguments.format);
  const data::Dataset dataset = data::open_dataset(arguments.path, arguments.options);
  struct Part {
    const char* name;
    const data::TokenSpan& span;
    double bytes_per_target;
    double entropy;
  };
  std::vector<Part> parts = {
      {"train", dataset.train, dataset.train_bytes_per_target, dataset.train_entropy_bits_per_byte}};
  if (dataset.validation.file) {
    parts.push_back({"validation", dataset.validation, dataset.validation_bytes_per_target,
                     dataset.validation_entropy_bits_per_byte});
  }
  nlohmann::ordered_json json;
  for (const Part& part : parts) {
    const data::TokenFile& file = *part.span.file;
    const auto documents = static_cast<std::int64_t>(part.span.document_begins().size()) - 1;
    std::vector<std::int32_t> ids(static_cast<std::size_t>(std::min(arguments.first, part.span.size())));
    file.read(part.span.begin, static_cast<std::int64_t>(ids.size()), ids.data());
    std::string text;
    if (dataset.tokenizer) {
      text::StreamDecoder decoder(*dataset.tokenizer);
      for (const std::int32_t id : ids) {
        text += dataset.tokenizer->is_special(id) ? fmt::format("<{}>", id) : decoder.push(id);
      }
    }
    json[part.name] = {{"file", file.path()},
                       {"format", data::name_of(file.format())},
                       {"type", name_of(file.dtype())},
                       {"tokens", part.span.size()},
                       {"documents", documents},
                       {"bytes_per_target", part.bytes_per_target},
                       {"entropy_bits_per_byte", part.entropy},
                       {"first_tokens", ids},
                       {"first_text", text}};
    if (arguments.json) continue;
    print("{}: {}, {} {}, {} tokens in {} documents (mean {:.1f})\n", part.name, file.path(),
          data::name_of(file.format()), name_of(file.dtype()), part.span.size(), documents,
          static_cast<double>(part.span.size()) / static_cast<double>(documents));
    if (part.bytes_per_target > 0.0) print("  {:.4f} bytes of text per predicted token\n", part.bytes_per_target);
    if (part.span.labels) {
      print("  {} places of each document are asked for ({})\n", part.span.labels->tokens() / documents / 2,
            part.span.labels->path());
    }
    if (part.entropy > 0.0) print("  true entropy {:.5f} bits per byte\n", part.entropy);
    print("  tokens {}\n", fmt::format("{}", nlohmann::json(ids).dump()));
    if (dataset.tokenizer) print("  text   {}\n", visible(text));
  }
  const std::string kind(dataset.tokenizer ? dataset.tokenizer->kind() : "unknown");
  if (arguments.json) {
    json["tokenizer"] = {{"kind", kind}, {"vocab_size", dataset.vocab_size}};
    if (dataset.tokenizer) json["tokenizer"]["fingerprint"] = dataset.tokenizer->fingerprint();
    print("{}\n", json_text(json, 2));
    return;
  }
  if (dataset.train.labels) {
    print("a task of {} words, without a tokenizer\n", dataset.vocab_size);
  } else if (dataset.tokenizer) {
    print("tokenizer: {}, {} words, fingerprint {}\n", kind, dataset.vocab_size, dataset.tokenizer->fingerprint());
  } else {
    print("tokenizer: unknown (--tokenizer names it); largest token {}\n", dataset.vocab_size - 1);
  }
}

void add_stories(CLI::App& data) {
  auto arguments = std::make_shared<StoriesArguments>();
  arguments->options.out = "stories.jsonl";
  CLI::App* verb = data.add_subcommand(
      "stories",
      "Makes a corpus of small stories whose true entropy per byte is known: the loss that no model can beat.\n"
      "Example: flashgla data stories --megabytes 8 --out runs/stories.jsonl");
  verb->add_option("--seed", arguments->options.seed, "Equal seeds give equal corpora")
      ->capture_default_str()
      ->transform(seed_number());
  verb->add_option("--megabytes", arguments->options.megabytes, "Size of the text, in 10^6 bytes")
      ->capture_default_str()
      ->check(positive_number());
  verb->add_option("--out", arguments->options.out,
                   "JSON lines with a text and its bits; figures go beside it as .json")
      ->capture_default_str();
  verb->add_flag("--json", arguments->json, "Print the figures as JSON");
  verb->add_flag("--quiet", arguments->quiet, "No progress line");
  verb->callback([arguments] { run_stories(*arguments); });
}

void add_recall(CLI::App& data) {
  auto arguments = std::make_shared<RecallArguments>();
  data::RecallOptions& options = arguments->options;
  CLI::App* verb = data.add_subcommand(
      "mqar",
      "Makes multi-query associative recall: keys and their values, then some of the keys again; at each, its value "
      "is\n"
      "to be said. `flashgla train` scores these places alone and reports the share of right answers.\n"
      "Example: flashgla data mqar --length 64 --pairs 4 --out runs/mqar");
  verb->add_option("--vocabulary", options.vocabulary, "Words: keys are of the lower half, values of the upper")
      ->capture_default_str()
      ->transform(positive_count());
  verb->add_option("--length", options.length, "Tokens of a sequence")
      ->capture_default_str()
      ->transform(positive_count());
  verb->add_option("--pairs", options.pairs, "Keys and values of a sequence, and as many questions")
      ->capture_default_str()
      ->transform(positive_count());
  verb->add_option("--power", options.power,
                   "Place s behind the pairs is asked at in proportion to (s+1)^(power-1): 1 is uniform, less is early")
      ->capture_default_str();
  verb->add_flag("--random-fillers", options.random_fillers,
                 "What stands between the questions: random words instead of word 0");
  verb->add_option("--train", options.train, "Sequences for training")
      ->capture_default_str()
      ->transform(count_or_zero());
  verb->add_option("--validation", options.validation, "Sequences for validation")
      ->capture_default_str()
      ->transform(count_or_zero());
  verb->add_option("--seed", options.seed, "Equal seeds give equal tasks")
      ->capture_default_str()
      ->transform(seed_number());
  verb->add_option("--out", options.out, "Folder of the task")->required();
  verb->add_flag("--quiet", arguments->quiet, "No progress line");
  verb->callback([arguments] { run_recall(*arguments); });
}

void add_prepare(CLI::App& data) {
  auto arguments = std::make_shared<PrepareArguments>();
  data::PrepareOptions& options = arguments->options;
  CLI::App* verb = data.add_subcommand(
      "prepare",
      "Turns text into a folder of tokens for training.\n"
      "Examples: flashgla data prepare book.txt --out runs/book\n"
      "          flashgla data prepare corpus/ more.jsonl --out runs/corpus --tokenizer train:8192\n"
      "          zcat dump.jsonl.gz | flashgla data prepare - --json-lines --out runs/dump --tokenizer MODEL_FOLDER");
  verb->add_option("inputs", options.inputs, "Files, folders, .jsonl files, or - for standard input")->required();
  verb->add_option("--out", options.out, "Folder of the tokens")->required();
  verb->add_option("--tokenizer", options.tokenizer,
                   "byte; a tokenizer.json, a SentencePiece model, or a folder with either; train:VOCAB or "
                   "train-unigram:VOCAB to train "
                   "one on the input")
      ->capture_default_str();
  verb->add_option("--text-field", options.text_field, "The text's field in JSON lines")->capture_default_str();
  verb->add_flag("--json-lines", options.json_lines, "Inputs are JSON lines whatever their names");
  verb->add_option("--separator", options.separator,
                   "Ends a document inside plain text, such as '<|endoftext|>' or '\\n\\n'; without it a file is one "
                   "document");
  verb->add_option("--validation", options.validation, "Share of the data kept for validation")
      ->capture_default_str()
      ->check(number_between(0.0, 0.5, "between 0 and 0.5"));
  verb->add_option("--seed", options.seed, "Chooses the validation documents")
      ->capture_default_str()
      ->transform(seed_number());
  verb->add_option("--threads", options.threads, "0: all")->capture_default_str()->transform(thread_count());
  verb->add_flag("--json", arguments->json, "Print the counts as JSON");
  verb->add_flag("--quiet", arguments->quiet, "No progress line");
  verb->callback([arguments] { run_prepare(*arguments); });
}

void add_data_info(CLI::App& data) {
  auto arguments = std::make_shared<DataInfoArguments>();
  CLI::App* verb = data.add_subcommand("info",
                                       "Says what is in prepared data or in a token file (Megatron, nanoGPT, llm.c).\n"
                                       "Example: flashgla data info runs/book");
  verb->add_option("path", arguments->path, "Folder or .bin file")->required();
  verb->add_option("--format", arguments->format, "Layout of a .bin file: auto, megatron, nanogpt, llm.c")
      ->capture_default_str()
      ->check(CLI::IsMember(std::vector<std::string>{"auto", "megatron", "nanogpt", "llm.c"}));
  verb->add_option("--tokenizer", arguments->options.tokenizer, "Tokenizer of a .bin file: folder or file");
  verb->add_option("--first", arguments->first, "How many tokens to show")
      ->capture_default_str()
      ->check(number_between(0, 1e6, "between 0 and 1000000"));
  verb->add_flag("--json", arguments->json, "Print as JSON");
  verb->callback([arguments] { run_info(*arguments); });
}

}  // namespace

void add_data(CLI::App& app) {
  CLI::App* verb = app.add_subcommand(
      "data",
      "Makes a corpus (stories) or a task (mqar), turns text into tokens (prepare), shows what data holds (info)");
  verb->require_subcommand(1);
  add_stories(*verb);
  add_recall(*verb);
  add_prepare(*verb);
  add_data_info(*verb);
}

}  // namespace flashgla::cli
