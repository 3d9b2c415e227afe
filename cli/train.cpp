// flashgla train: from tokens, or plain text, to a model.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/checks.h"
#include "cli/command.h"
#include "cli/devices.h"
#include "cli/interruption.h"
#include "cli/progress.h"
#include "cli/say.h"
#include "cli/state_size.h"
#include "cli/verbs.h"
#include "flashgla/base/error.h"
#include "flashgla/base/file.h"
#include "flashgla/base/json.h"
#include "flashgla/base/memory.h"
#include "flashgla/data/dataset.h"
#include "flashgla/data/prepare.h"
#include "flashgla/model/checksum.h"
#include "flashgla/train/peak_rate.h"
#include "flashgla/train/run_folder.h"
#include "flashgla/train/trainer.h"

namespace flashgla::cli {

namespace {

namespace fs = std::filesystem;

// Of validation, where plain text is given.
constexpr double kValidationShare = 0.1;
// In the folder of its tokens: which text they are of.
constexpr const char* kSourceFile = "source.json";

struct TrainArguments {
  std::string config;
  std::map<std::string, std::string> fields;  // given on the command line
  std::int64_t batch = 0;                     // sequences, in place of batch_tokens
  std::int64_t steps = 0;                     // in place of train_tokens
  bool resume = false;
  bool quiet = false;
  bool plan_only = false;
};

bool is_plain_text(const std::string& path) {
  const fs::path file(path);
  return fs::is_regular_file(file) && file.extension() != ".bin" && file.extension() != ".idx";
}

// Plain text becomes byte-level tokens in the run folder, with the text's name and checksum beside them: tokens of
// another text, or such as were not finished, are made anew, but not under a run that was begun with them.
std::string prepared(const std::string& path, const std::string& out, bool quiet) {
  const std::string folder = out + "/data";
  const std::string source_file = folder + "/" + kSourceFile;
  model::Checksum checksum;
  {
    const MappedFile text(path);
    checksum.add(text.data(), text.size());
  }
  nlohmann::json source;
  if (fs::exists(source_file)) source = parse_json<nlohmann::json>(read_file(source_file), source_file);
  const bool known = source.is_object() && source.contains("xxh3");
  const bool whole = fs::exists(folder + "/" + data::kDatasetFile);
  const bool run_begun = !train::RunFolder(out).checkpoints().empty();
  if (whole && (known ? source["xxh3"] == checksum.text() : run_begun)) return folder;
  if (run_begun) {
    throw Error("train: --data is " + path + ", but the run in " + out + " was begun with another text" +
                (known ? ", " + source.value("file", "") : "") + "; leave --data out, or choose another --out");
  }
  if (!known && fs::exists(folder) && !fs::is_empty(folder)) {
    throw Error("train: " + folder + " holds files already, and " + path +
                "'s tokens are to go there; choose another --out");
  }
  make_folder(folder);
  train::RunFolder run(out);
  run.create();  // nobody else prepares or trains here meanwhile
  std::vector<std::string> made = data::prepared_files();
  made.emplace_back(kSourceFile);
  remove_partial_files(folder, made);
  for (const std::string& name : data::prepared_files()) fs::remove(folder + "/" + name);
  write_file(source_file, nlohmann::json{{"file", path}, {"xxh3", checksum.text()}}.dump() + "\n");
  Progress progress("preparing " + path, 0, quiet);
  data::PrepareOptions options;
  options.inputs = {path};
  options.out = folder;
  options.validation = kValidationShare;
  const data::PrepareReport report = data::prepare(options);
  progress.message(fmt::format("{}: {} tokens (bytes) for training, {} for validation, in {}", path,
                               format_count(static_cast<double>(report.train.tokens)),
                               format_count(static_cast<double>(report.validation.tokens)), folder));
  return folder;
}

void print_plan(train::Trainer& trainer) {
  const auto& config = trainer.model().config();
  print("{} parameters: {} {} layers of width {}, vocabulary {}\n",
        format_count(static_cast<double>(trainer.model().parameters().count())), config.num_hidden_layers,
        config.model_type, config.hidden_size, config.vocab_size);
  const auto& run = trainer.config();
  print("{} steps of {} tokens ({} sequences of {}, {} at a time), order {}\n", trainer.total_steps(), run.batch_tokens,
        run.sequences_per_batch(), run.sequence_length, run.sequences_per_micro_batch(), run.order);
  print("on {} ({}) in {}; recomputed: {}\n", run.device, device_name(trainer.context().device()), run.dtype,
        run.recompute);
  print("\nmemory\n");
  const auto& plan = trainer.plan();
  for (std::size_t i = 0; i < plan.rows.size();) {
    std::size_t sum = 0;
    std::size_t end = i;
    for (; end < plan.rows.size() && plan.rows[end].group == plan.rows[i].group; ++end) sum += plan.rows[end].bytes;
    print("  {:<42} {:>10}\n", plan.rows[i].group, format_bytes(static_cast<double>(sum)));
    for (; i < end; ++i) {
      if (plan.rows[i].bytes * 20 < sum) continue;  // small things are in the sum
      print("    {:<40} {:>10}\n", plan.rows[i].label, format_bytes(static_cast<double>(plan.rows[i].bytes)));
    }
  }
  print("  {:<42} {:>10}\n", "total", format_bytes(static_cast<double>(plan.total())));
  print("  decoding later: state of each sequence     {}\n\n", text_of(state_size(config)));
  std::fflush(stdout);
}

// The share of what the device's data sheet promises (MFU) is said with its denominator, and only where it is known.
std::string figures_of(const train::MetricsRow& row, double peak_rate, std::size_t memory) {
  std::string text = fmt::format("loss {:.4f}", row.loss);
  if (std::isfinite(row.bits_per_byte)) text += fmt::format("  {:.3f} bits/byte", row.bits_per_byte);
  text += fmt::format("  {} tok/s", format_count(row.tokens_per_second));
  if (peak_rate > 0.0) {
    text += fmt::format("  MFU {:.1f}% of {:.0f} TFLOP/s", 100.0 * row.flops_per_second / peak_rate, peak_rate / 1e12);
  }
  return text + "  " + format_bytes(static_cast<double>(memory));
}

std::int64_t tokens_of(const char* flag, std::int64_t count, std::int64_t tokens_each) {
  if (tokens_each > 0 && count > kMostCount / tokens_each) {
    throw Error(fmt::format("train: {} is {}, of {} tokens each; expected at most {} tokens in all", flag, count,
                            tokens_each, kMostCount));
  }
  return count * tokens_each;
}

train::TrainConfig resolve(const TrainArguments& arguments) {
  train::TrainConfig config;
  const auto out = arguments.fields.find("out");
  const bool known_run = arguments.resume && out != arguments.fields.end() && fs::exists(out->second + "/train.json");
  if (!arguments.config.empty()) {
    train::load_config(config, arguments.config);
  } else if (known_run) {
    train::load_config(config, out->second + "/train.json");
  }
  for (const auto& [name, text] : arguments.fields) train::set_field(config, name, text);
  if (arguments.resume && config.out.empty()) throw Error("train: --resume needs --out, the folder of the run");
  if (arguments.resume && !known_run && config.data.empty()) {
    throw Error(config.out + ": there is no run to go on with, nor --data to begin one");
  }
  if (arguments.fields.contains("model") && arguments.fields.contains("initial_weights")) {
    throw Error("train: --initial-weights brings its model; leave --model out");
  }
  if (arguments.batch > 0) config.batch_tokens = tokens_of("--batch", arguments.batch, config.sequence_length);
  if (arguments.steps > 0) config.train_tokens = tokens_of("--steps", arguments.steps, config.batch_tokens);
  return config;
}

void run_train(const TrainArguments& arguments) {
  ::signal(SIGPIPE, SIG_IGN);  // who reads the messages may go away; the run goes on
  train::TrainConfig config = resolve(arguments);
  config.validate();
  chosen_device(config.device);
  // A run folder holds the tokens of a plain text that it was begun with, wherever either lies now.
  const std::string own = config.out + "/data";
  if (arguments.resume && !arguments.fields.contains("data") && !fs::exists(config.data) &&
      fs::exists(own + "/" + data::kDatasetFile)) {
    config.data = own;
  }
  if (!fs::exists(config.data)) {
    throw Error(config.data + ": there is no such data" +
                (arguments.resume && arguments.config.empty() && !arguments.fields.contains("data")
                     ? " here, with which the run was begun; --data says where it is now"
                     : "; see flashgla data --help"));
  }
  if (is_plain_text(config.data)) config.data = prepared(config.data, config.out, arguments.quiet);

  std::unique_ptr<Progress> progress;
  const auto notice = [&](const std::string& line) {
    if (progress) {
      progress->message(line);
    } else if (!arguments.quiet) {
      say("{}\n", line);
    }
  };
  // Figures of the last rows, so that the line does not jump.
  double loss = 0.0;
  double peak_rate = 0.0;
  std::size_t memory = 0;
  train::Events events;
  events.step = [&](const train::MetricsRow& row) {
    if (row.kind == "skipped") {
      notice(row.message);
      return;
    }
    loss = loss == 0.0 ? row.loss : 0.95 * loss + 0.05 * row.loss;
    train::MetricsRow shown = row;
    shown.bits_per_byte *= loss / row.loss;
    shown.loss = loss;
    progress->update(row.step, figures_of(shown, peak_rate, memory));
  };
  events.evaluation = [&](const train::MetricsRow& row) {
    std::string line =
        fmt::format("step {}: validation loss {:.4f}, perplexity {:.2f}", row.step, row.loss, row.perplexity);
    if (std::isfinite(row.bits_per_byte)) line += fmt::format(", {:.4f} bits/byte", row.bits_per_byte);
    if (std::isfinite(row.accuracy)) line += fmt::format(", accuracy {:.4f}", row.accuracy);
    notice(line);
  };
  events.checkpoint = [&](const std::string& path) { notice("saved " + path); };
  events.notice = notice;
  events.stop_requested = interrupted;

  train::Trainer trainer(config, events, arguments.resume, arguments.plan_only);
  if (trainer.config().dtype == "bf16") peak_rate = train::peak_rate(device_name(trainer.context().device()));
  memory = trainer.plan().total();
  if (!arguments.plan_only) trainer.begin();
  if (!arguments.quiet) print_plan(trainer);
  if (arguments.plan_only) return;
  const InterruptionScope signals({"\nflashgla: finishing the step and saving; once more to stop at once\n",
                                   "\nflashgla: stopped at once; the last checkpoint is as it was\n"});
  progress = std::make_unique<Progress>("training", trainer.total_steps(), arguments.quiet);
  if (trainer.steps_done() > 0) notice(fmt::format("going on from step {}", trainer.steps_done()));
  const train::Outcome outcome = trainer.run();
  progress.reset();
  if (outcome == train::Outcome::interrupted) {
    print("stopped at step {} of {}; go on with:\n  {}\n", trainer.steps_done(), trainer.total_steps(),
          command({"train", "--out", config.out, "--resume"}));
    std::fflush(stdout);
    throw CLI::RuntimeError(130);  // as a program ended by Ctrl-C, so that a script does not go on
  }
  if (arguments.quiet) return;
  print("finished: {}\n", config.out);
  const double entropy = trainer.dataset().validation_entropy_bits_per_byte;
  const double reached = trainer.last_evaluation() ? trainer.last_evaluation()->bits_per_byte : 0.0;
  if (entropy > 0.0 && reached > 0.0) {
    print("the source's own entropy is {:.4f} bits/byte: the model is {:.4f} ({:.1f}%) above it\n", entropy,
          reached - entropy, 100.0 * (reached / entropy - 1.0));
  }
  if (trainer.dataset().tokenizer) print("next: {}\n", command({"generate", config.out}));
  print("next: {}\n", command({"plot", config.out}));
}

}  // namespace

void add_train(CLI::App& app) {
  auto arguments = std::make_shared<TrainArguments>();
  CLI::App* verb = app.add_subcommand(
      "train",
      "Trains a model. Data: a folder made by `flashgla data prepare`, or a plain text file (taken byte by byte, its\n"
      "last tenth kept for validation). The flags below are also keys of the --config file\n"
      "(--batch-tokens is batch_tokens), but for --config, --resume, --quiet, --plan, --batch and --steps; flags win.\n"
      "\n"
      "  flashgla train --data book.txt --out runs/book                     a small model on one text\n"
      "  flashgla train --config configs/gla-340m-15b.json --data D --out R   the paper's recipe\n"
      "  flashgla train --out runs/book --resume                            go on with an interrupted run\n"
      "\n"
      "Ctrl-C ends the step, saves, and says how to go on.");
  verb->add_option("--config", arguments->config, "JSON file with any of the fields below (see configs/)")
      ->check(CLI::ExistingFile);
  verb->add_flag("--resume", arguments->resume,
                 "Go on from the newest whole checkpoint in the run folder, with its configuration unless --config is "
                 "given; without a checkpoint, begin");
  verb->add_flag("--quiet", arguments->quiet, "Print nothing but errors and how to go on");
  verb->add_flag("--plan", arguments->plan_only, "Print the memory plan and stop");
  train::TrainConfig defaults;
  for (const train::Field& field : train::fields(defaults)) {
    std::string flag = std::string("--") + field.name;
    for (char& c : flag) c = c == '_' ? '-' : c;
    if (flag == "--model") flag += ",--preset";
    if (flag == "--sequence-length") flag += ",--length";
    const std::string standard = train::value_text(field);
    const std::string name = field.name;
    auto* option = verb->add_option_function<std::string>(
        flag, [arguments, name](const std::string& text) { arguments->fields[name] = text; }, field.help);
    option->group(field.group)->type_name(field.value.index() == 0 ? "TEXT" : "NUMBER");
    if (!standard.empty()) option->default_str(standard);
  }
  verb->add_option("--batch", arguments->batch, "Sequences of one update, in place of --batch-tokens")
      ->transform(positive_count())
      ->excludes("--batch-tokens")
      ->group("length");
  verb->add_option("--steps", arguments->steps, "Updates, in place of --train-tokens")
      ->transform(positive_count())
      ->excludes("--train-tokens")
      ->group("length");
  verb->callback([arguments] { run_train(*arguments); });
}

}  // namespace flashgla::cli
