// The program `flashgla`: parses the command line, runs one verb, reports an error in one line.
#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <new>
#include <string>
#include <vector>

#include "cli/command.h"
#include "cli/commit.h"
#include "cli/help.h"
#include "cli/say.h"
#include "cli/verbs.h"
#include "flashgla/base/names.h"

namespace {

constexpr const char* kDescription =
    "FlashGLA: train, evaluate and run gated linear attention models.\n"
    "\n"
    "A first run:\n"
    "  flashgla data stories --megabytes 8 --out runs/stories.jsonl   make a corpus\n"
    "  flashgla data prepare runs/stories.jsonl --out runs/stories    turn text into tokens\n"
    "  flashgla train --data runs/stories --out runs/first            train a small model\n"
    "  flashgla evaluate runs/first --data runs/stories               measure it\n"
    "  flashgla generate runs/first --prompt 'Once upon a time'       let it write\n"
    "\n"
    "Each verb explains itself: flashgla VERB --help. Exit codes: 0 done, 1 an error, 2 wrong flags,\n"
    "130 ended by Ctrl-C (train, evaluate, generate)";

using flashgla::did_you_mean;
using flashgla::cli::print;
using flashgla::cli::say;

constexpr int kUsageError = 2;

// Files must not get the numbers of standard streams: messages would be written into them.
void open_standard_streams() {
  for (int stream = 0; stream <= 2; ++stream) {
    if (::fcntl(stream, F_GETFD) < 0) ::open("/dev/null", O_RDWR);  // gets the lowest free number
  }
}

// What CLI11 says of a mistake, where its words are hard to read.
std::string in_words(const CLI::Error& error, const CLI::App& verb) {
  const std::string text = error.what();
  if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::ExtrasError)) {
    const std::vector<std::string> extras = verb.remaining();
    const auto flag =
        std::find_if(extras.begin(), extras.end(), [](const auto& each) { return each.starts_with("-"); });
    if (flag != extras.end()) {
      const std::string name = flag->substr(0, flag->find('='));
      std::vector<std::string> known;
      for (const CLI::Option* option : verb.get_options()) {
        for (const std::string& each : option->get_lnames()) known.push_back("--" + each);
      }
      return "there is no flag " + name + did_you_mean(name, known);
    }
    return extras.empty() ? text : "'" + extras.front() + "' was not expected";
  }
  if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::ArgumentMismatch)) {
    const std::string name = text.substr(0, text.find(':'));
    if (text.find("At Most 1") != std::string::npos) return name + " is given more than once";
    if (text.find(" missing") != std::string::npos) return name + " needs a value";
  }
  return text;
}

// Says the error; returns the exit code, which is not 0 either when standard output could not be written in full.
int end(int code, const std::string& error = "") {
  const bool written = std::fflush(stdout) == 0 && std::ferror(stdout) == 0;
  if (!error.empty()) {
    say("flashgla: error: {}\n", error);
  } else if (!written) {
    say("flashgla: error: standard output could not be written in full; is the disk full, or did its reader end?\n");
  }
  return code == 0 && !written ? 1 : code;
}

}  // namespace

int main(int argc, char** argv) {
  open_standard_streams();
  if (argc > 0) flashgla::cli::set_program(argv[0]);
  CLI::App app(kDescription, "flashgla");
  app.set_version_flag("--version", fmt::format("flashgla {} ({})", FLASHGLA_VERSION, flashgla::cli::source_commit()));
  app.require_subcommand(0, 1);
  app.formatter(flashgla::cli::help_formatter());
  app.failure_message([](const CLI::App* failed, const CLI::Error& error) {
    const CLI::App* verb = failed;
    while (!verb->get_subcommands().empty()) verb = verb->get_subcommands().front();
    std::string name = verb->get_name();
    for (const CLI::App* parent = verb->get_parent(); parent != nullptr; parent = parent->get_parent()) {
      name = parent->get_name() + " " + name;
    }
    const auto known = verb->get_subcommands([](const CLI::App*) { return true; });
    const auto unknown = verb->remaining();
    if (!known.empty() && !unknown.empty() && !unknown.front().starts_with("-")) {
      std::string names;
      for (const CLI::App* each : known) names += (names.empty() ? "" : ", ") + each->get_name();
      return fmt::format("flashgla: error: there is no '{} {}'; known: {}\n", name, unknown.front(), names);
    }
    return fmt::format("flashgla: error: {}; see {} --help\n", in_words(error, *verb), name);
  });

  flashgla::cli::add_train(app);
  flashgla::cli::add_evaluate(app);
  flashgla::cli::add_generate(app);
  flashgla::cli::add_data(app);
  flashgla::cli::add_plot(app);
  flashgla::cli::add_info(app);
  flashgla::cli::add_convert(app);
  flashgla::cli::add_bench(app);
  flashgla::cli::add_doctor(app);

  try {
    app.parse(argc, argv);
    if (app.get_subcommands().empty()) print("{}", app.help());
    return end(0);
  } catch (const CLI::RuntimeError& error) {
    return end(app.exit(error));
  } catch (const CLI::ParseError& error) {
    return end(app.exit(error) == 0 ? 0 : kUsageError);  // 0: help was asked for
  } catch (const std::filesystem::filesystem_error& error) {
    return end(1, fmt::format("{}: {}", error.path1().string(), error.code().message()));
  } catch (const std::bad_alloc&) {
    return end(1, "there is not enough memory");
  } catch (const std::exception& error) {
    return end(1, error.what());
  }
}
