// The program `flashgla`: parses the command line, runs one verb, reports an error in one line.
#include <fmt/core.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <system_error>

#include "cli/verbs.h"

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
    "Each verb explains itself: flashgla VERB --help";

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(kDescription, "flashgla");
  app.set_version_flag("--version", std::string("flashgla ") + FLASHGLA_VERSION);
  app.require_subcommand(0, 1);
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
    return fmt::format("flashgla: error: {}; see {} --help\n", error.what(), name);
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
    if (app.get_subcommands().empty()) {
      fmt::print("{}", app.help());
      return 0;
    }
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  } catch (const std::exception& error) {
    std::fflush(stdout);
    fmt::print(stderr, "flashgla: error: {}\n", error.what());
    return 1;
  }
  return 0;
}
