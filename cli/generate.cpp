// flashgla generate: text from a model.
#include <fmt/core.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>

#include "cli/checks.h"
#include "cli/interruption.h"
#include "cli/model_flags.h"
#include "cli/progress.h"
#include "cli/say.h"
#include "cli/verbs.h"
#include "flashgla/base/error.h"
#include "flashgla/base/file.h"
#include "flashgla/base/json.h"
#include "flashgla/generate/generator.h"
#include "flashgla/train/run_folder.h"

namespace flashgla::cli {

namespace {

using Clock = std::chrono::steady_clock;

struct GenerateArguments {
  std::string model;
  ModelFlags flags;
  std::string prompt;
  std::string prompts_file;
  std::string save_state;
  std::string load_state;
  std::vector<std::string> stop;
  generate::GenerateOptions options;
  std::int64_t seed = -1;
  bool prompt_given = false;
  bool interactive = false;
  bool json = false;
  bool ignore_end = false;
  bool only_new = false;
};

std::string standard_input() { return {std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>()}; }

// One prompt a line; lines that begin with '{' are JSON objects with a "prompt".
std::vector<std::string> read_prompts(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file || file.peek() == std::ifstream::traits_type::eof()) {
    throw Error(
        "generate: --prompts " + path + ": " +
        (file.is_open() && !file.bad() && !std::filesystem::is_directory(path) ? "holds no prompt" : "cannot be read"));
  }
  std::vector<std::string> prompts;
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    if (line.ends_with('\r')) line.pop_back();
    if (line.empty()) continue;
    if (line.front() != '{') {
      prompts.push_back(line);
      continue;
    }
    try {
      prompts.push_back(nlohmann::json::parse(line).at("prompt").get<std::string>());
    } catch (const nlohmann::json::exception& error) {
      throw Error(path + ": line " + std::to_string(number) +
                  " is no JSON object with a \"prompt\": " + json_reason(error));
    }
  }
  if (prompts.empty()) throw Error("generate: --prompts " + path + ": holds no prompt");
  return prompts;
}

struct Speed {
  std::int64_t prompt_tokens = 0;
  double prompt_seconds = 0.0;
  std::int64_t tokens = 0;
  double seconds = 0.0;
};

void print_speed(const Speed& speed, std::uint64_t seed) {
  std::string line = "\n[";
  if (speed.prompt_tokens > 0) {
    line += fmt::format("prompt {} tokens, {} tok/s; ", speed.prompt_tokens,
                        format_count(static_cast<double>(speed.prompt_tokens) / std::max(speed.prompt_seconds, 1e-9)));
  }
  line += fmt::format("generated {} tokens, {} tok/s; seed {}]\n", speed.tokens,
                      format_count(static_cast<double>(speed.tokens) / std::max(speed.seconds, 1e-9)), seed);
  std::fflush(stdout);
  say("{}", line);
}

// A line typed, what the model makes of it, the next line: one sequence, without end.
void converse(const generate::Generator& generator, const model::LanguageModel& model, generate::Session& session,
              const GenerateArguments& arguments) {
  say("Type the beginning of a text and press Enter; an empty line lets the model go on. Ctrl-C stops the text,\n"
      "Ctrl-D leaves. /reset forgets everything, /save FILE keeps the state; // begins a text with a slash.\n");
  const mixers::MostTokens most = model.config().most_tokens();  // of a model whose sequences have an end
  std::string line;
  Speed speed;
  for (;;) {
    say("\n> ");
    forget_interruptions();
    if (!std::getline(std::cin, line)) break;
    if (line == "/reset") {
      session.reset();
      continue;
    }
    if (line.starts_with("/save ")) {
      try {
        session.save(model, line.substr(6));
        say("saved {}\n", line.substr(6));
      } catch (const Error& error) {
        say("{}\n", error.what());
      }
      continue;
    }
    if (line.starts_with("//")) {
      line.erase(0, 1);
    } else if (line.starts_with("/")) {
      say("no such command: {}; there are /reset and /save FILE, and // begins a text with a slash\n", line);
      continue;
    }
    auto start = Clock::now();
    const bool begins = session.fresh();
    const text::TokenIds tokens = generator.encode(line, begins);
    const auto count = static_cast<std::int64_t>(tokens.size());
    generate::GenerateOptions options = arguments.options;
    options.max_tokens = std::min(options.max_tokens, most.count - session.longest() - count);
    if (options.max_tokens < std::min<std::int64_t>(arguments.options.max_tokens, 1)) {
      say("no room for that: {} of the {} {} are taken, and it has {}; /reset forgets them\n", session.longest(),
          most.count, most.what, count);
      continue;
    }
    const std::int64_t read = tokens.empty() ? 0 : generator.feed(session, {tokens}, options.should_stop);
    speed.prompt_tokens += read;
    speed.prompt_seconds += seconds_since(start);
    if (read < count) {
      say("interrupted after {} of {} prompt tokens, which stay; /reset forgets them, and all before\n", read, count);
      continue;
    }
    start = Clock::now();
    if (!arguments.only_new) print("{}", line);
    const auto results = generator.generate(session, options, [](std::size_t, std::string_view text) {
      std::fwrite(text.data(), 1, text.size(), stdout);
      std::fflush(stdout);
    });
    print("\n");
    std::fflush(stdout);
    speed.tokens += results.front().tokens;
    speed.seconds += seconds_since(start);
  }
  print_speed(speed, arguments.options.sampling.seed);
}

void run_generate(GenerateArguments& arguments) {
  const std::string folder = train::find_model_folder(arguments.model, arguments.flags.checkpoint);
  std::vector<std::string> prompts;
  if (!arguments.prompts_file.empty()) {
    prompts = read_prompts(arguments.prompts_file);
  } else if (arguments.prompt_given) {
    prompts = {arguments.prompt};
  } else if (!arguments.interactive && ::isatty(STDIN_FILENO) == 0) {
    prompts = {standard_input()};
  } else {
    prompts = {""};
  }
  if (prompts.size() > 1 && !(arguments.save_state.empty() && arguments.load_state.empty())) {
    throw Error("generate: --save-state and --load-state go with one prompt, not " + std::to_string(prompts.size()));
  }
  for (const std::string& stop : arguments.stop) {
    if (stop.empty()) throw Error("generate: --stop is empty; expected the text where to end");
    arguments.options.stop.push_back(unescaped(stop));
  }
  if (!arguments.save_state.empty()) require_writable(arguments.save_state);  // not learnt of when all is done
  arguments.options.stop_at_end = !arguments.ignore_end;
  arguments.options.ends_session = arguments.save_state.empty() && !arguments.interactive;
  arguments.options.sampling.seed =
      arguments.seed >= 0 ? static_cast<std::uint64_t>(arguments.seed) : std::random_device{}();
  arguments.options.sampling.validate();

  Context context(arguments.flags.chosen_device(), arguments.flags.threads);
  const auto model = model::load_model(folder, arguments.flags.load_options(context.device()));
  const auto tokenizer = text::load_tokenizer(folder);
  const generate::Generator generator(context, *model, *tokenizer);
  generate::Session session(*model, static_cast<std::int64_t>(prompts.size()));
  if (!arguments.load_state.empty()) session.load(*model, arguments.load_state);

  // Ctrl-C ends the reading of a prompt, the text being written, or the wait for a line.
  const InterruptionScope signals(
      {.first = "\nflashgla: stopping; once more to stop at once\n", .terminate = false, .restart = false});
  arguments.options.should_stop = interrupted;
  if (arguments.interactive) {
    converse(generator, *model, session, arguments);
    if (!arguments.save_state.empty()) session.save(*model, arguments.save_state);
    return;
  }

  Speed speed;
  auto start = Clock::now();
  const bool begins = session.fresh();
  std::vector<text::TokenIds> tokens;
  for (const std::string& prompt : prompts) {
    tokens.push_back(generator.encode(prompt, begins));
    speed.prompt_tokens += static_cast<std::int64_t>(tokens.back().size());
  }
  // An empty prompt goes on from a loaded state as it is.
  if (begins || !tokens.front().empty()) {
    const std::int64_t read = generator.feed(session, tokens, interrupted);
    if (read < speed.prompt_tokens) {
      say("flashgla: interrupted after {} of {} prompt tokens{}\n", read, speed.prompt_tokens,
          arguments.save_state.empty() ? "" : "; " + arguments.save_state + " is not written");
      throw CLI::RuntimeError(kInterruptedCode);
    }
  }
  speed.prompt_seconds = seconds_since(start);
  const mixers::MostTokens most = model->config().most_tokens();
  if (session.longest() + arguments.options.max_tokens > most.count) {
    throw Error(fmt::format(
        "generate: --max-tokens is {}; expected at most {}: behind the prompt's {} tokens there are "
        "no more of the {} {}",
        arguments.options.max_tokens, most.count - session.longest(), session.longest(), most.count, most.what));
  }

  // One text is streamed; several would be mixed up, and are written when all are done.
  const bool stream = prompts.size() == 1 && !arguments.json;
  std::vector<std::string> texts(prompts.size());
  if (stream && !arguments.only_new) print("{}", prompts.front());
  start = Clock::now();
  const auto results = generator.generate(session, arguments.options, [&](std::size_t i, std::string_view text) {
    if (!stream) {
      texts[i] += text;
      return;
    }
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  });
  speed.seconds = seconds_since(start);
  for (const generate::Generation& result : results) speed.tokens += result.tokens;
  for (std::size_t i = 0; i < prompts.size() && !stream; ++i) {
    if (arguments.json) {
      const nlohmann::ordered_json row = {{"prompt", prompts[i]},
                                          {"text", texts[i]},
                                          {"prompt_tokens", tokens[i].size()},
                                          {"tokens", results[i].tokens},
                                          {"finish", generate::name_of(results[i].finish)},
                                          {"seed", arguments.options.sampling.seed}};
      print("{}\n", json_text(row));
    } else {
      print("[{}]\n{}{}\n", i + 1, arguments.only_new ? "" : prompts[i], texts[i]);
    }
  }
  if (stream) print("\n");
  if (!arguments.save_state.empty()) session.save(*model, arguments.save_state);
  print_speed(speed, arguments.options.sampling.seed);
  for (const generate::Generation& result : results) {
    if (result.finish == generate::Finish::interrupted) throw CLI::RuntimeError(kInterruptedCode);
  }
}

}  // namespace

void add_generate(CLI::App& app) {
  auto arguments = std::make_shared<GenerateArguments>();
  auto& sampling = arguments->options.sampling;
  CLI::App* verb = app.add_subcommand(
      "generate",
      "Lets a model write. The prompt comes from --prompt, from --prompts (one a line, written side by side), or from\n"
      "standard input. A GLA model's memory does not grow with the length of the text.\n"
      "\n"
      "  flashgla generate runs/first --prompt 'Once upon a time' --temperature 0.8\n"
      "  flashgla generate runs/first --interactive\n"
      "  flashgla generate M --prompt \"$(cat long.txt)\" --max-tokens 0 --save-state long.state\n"
      "  flashgla generate M --load-state long.state --prompt ' The end'     the long prompt is not read again");
  verb->add_option("model", arguments->model, "A model folder, or the run folder of flashgla train")->required();
  auto* prompt = verb->add_option_function<std::string>(
      "--prompt",
      [arguments](const std::string& text) {
        arguments->prompt = text;
        arguments->prompt_given = true;
      },
      "The beginning of the text");
  auto* prompts = verb->add_option("--prompts", arguments->prompts_file,
                                   "File of prompts: one a line, or JSON lines with a \"prompt\"");
  auto* interactive = verb->add_flag("--interactive", arguments->interactive, "Type, and let the model go on");
  prompt->excludes(prompts);
  interactive->excludes(prompt)->excludes(prompts);
  verb->add_option("--max-tokens", arguments->options.max_tokens, "Most tokens to write (of each text)")
      ->capture_default_str()
      ->transform(count_or_zero());
  verb->add_option("--temperature", sampling.temperature, "Below 1: more likely; above: more varied; 0: greedy")
      ->capture_default_str()
      ->check(non_negative_number())
      ->group("Sampling");
  verb->add_flag_callback(
          "--greedy", [arguments] { arguments->options.sampling.temperature = 0.0; }, "Always the most likely token")
      ->excludes("--temperature")
      ->group("Sampling");
  verb->add_option("--top-k", sampling.top_k, "Only the k most likely tokens; 0: all")
      ->capture_default_str()
      ->transform(count_or_zero())
      ->group("Sampling");
  verb->add_option("--top-p", sampling.top_p, "Only the most likely tokens that together reach this probability")
      ->capture_default_str()
      ->check(number_between(std::numeric_limits<double>::denorm_min(), 1.0, "above 0 and at most 1"))
      ->group("Sampling");
  verb->add_option("--min-p", sampling.min_p, "Only tokens with this share of the most likely one's probability")
      ->capture_default_str()
      ->check(number_between(0.0, 1.0, "from 0 to 1"))
      ->group("Sampling");
  verb->add_option("--repetition-penalty", sampling.repetition_penalty,
                   "Above 1: tokens already seen become less likely")
      ->capture_default_str()
      ->check(positive_number())
      ->group("Sampling");
  verb->add_option("--seed", arguments->seed, "Equal seeds write equal texts; -1: a new one each time (it is printed)")
      ->capture_default_str()
      ->transform(count_between(-1, std::int64_t{1} << 53, "-1 or a whole number from 0 to 2^53"))
      ->group("Sampling");
  verb->add_option("--stop", arguments->stop, "End where this text would come (may be repeated; \\n is a new line)")
      ->allow_extra_args(false);
  verb->add_flag("--ignore-end", arguments->ignore_end, "Go on past the model's end-of-text token");
  verb->add_option("--save-state", arguments->save_state, "Write the state to this file at the end");
  verb->add_option("--load-state", arguments->load_state, "Go on from a saved state")->check(CLI::ExistingFile);
  verb->add_flag("--json", arguments->json, "Print one JSON object for each prompt")->excludes(interactive);
  verb->add_flag("--only-new", arguments->only_new, "Do not repeat the prompt before the text");
  arguments->flags.add_to(*verb);
  verb->callback([arguments] { run_generate(*arguments); });
}

}  // namespace flashgla::cli
