// flashgla bench: times every implementation of the operators and the model, beside the floor.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/checks.h"
#include "cli/verbs.h"
#include "flashgla/base/error.h"
#include "flashgla/model/bench.h"
#include "flashgla/ops/benches.h"

namespace flashgla::cli {

namespace {

struct BenchArguments {
  std::vector<std::string> names;
  std::string device = "cpu";
  std::string implementation;
  std::string peer;
  int threads = 0;
  double seconds = 0.5;
  bool sweep = false;
  bool json = false;
};

// The rows that other rows are compared with, when they are of the same run.
struct Ceilings {
  double gemm_flops = 0.0;      // FLOP/s of the vendor's fp32 product of 1024^3
  double read_bandwidth = 0.0;  // bytes/s
};

void note_ceilings(const testing::BenchRow& row, Ceilings& ceilings) {
  const double seconds = row.milliseconds * 1e-3;
  if (seconds <= 0.0) return;
  if (row.operation == ops::kGemmCeiling) ceilings.gemm_flops = row.flops / seconds;
  if (row.operation == ops::kReadCeiling) ceilings.read_bandwidth = row.bytes / seconds;
}

void print_header() {
  fmt::print("{:<34} {:<16} {:<44} {:>9} {:>9} {:>8} {:>7} {:>7} {:>7} {:>9}\n", "operation", "implementation",
             "problem", "ms", "GFLOP/s", "GB/s", "/GEMM", "/read", "/floor", "error");
}

void print_row(const testing::BenchRow& row, const Ceilings& ceilings) {
  fmt::print("{:<34} {:<16} {:<44} ", row.operation, row.implementation, row.problem);
  if (!row.refused.empty()) {
    fmt::print("refused: {}\n", row.refused);
    return;
  }
  const double seconds = row.milliseconds * 1e-3;
  auto cell = [](double value, int width, int digits) {
    return value > 0.0 ? fmt::format("{:>{}.{}f}", value, width, digits) : fmt::format("{:>{}}", "-", width);
  };
  const double flops = seconds > 0.0 ? row.flops / seconds : 0.0;
  const double bytes = seconds > 0.0 ? row.bytes / seconds : 0.0;
  fmt::print("{} {} {} {} {} {} {}\n", cell(row.milliseconds, 9, row.milliseconds < 10 ? 4 : 2),
             cell(flops * 1e-9, 9, 1), cell(bytes * 1e-9, 8, 1),
             cell(ceilings.gemm_flops > 0 ? flops / ceilings.gemm_flops : 0.0, 7, 2),
             cell(ceilings.read_bandwidth > 0 ? bytes / ceilings.read_bandwidth : 0.0, 7, 2),
             cell(row.floor_milliseconds > 0 ? row.floor_milliseconds / row.milliseconds : 0.0, 7, 2),
             row.error > 0.0 ? fmt::format("{:>9.1e}", row.error) : fmt::format("{:>9}", "-"));
}

nlohmann::json to_json(const testing::BenchRow& row) {
  nlohmann::json object = {
      {"operation", row.operation}, {"implementation", row.implementation}, {"problem", row.problem}};
  if (!row.refused.empty()) {
    object["refused"] = row.refused;
    return object;
  }
  object["milliseconds"] = row.milliseconds;
  object["flops"] = row.flops;
  object["bytes"] = row.bytes;
  if (row.floor_milliseconds > 0) object["floor_milliseconds"] = row.floor_milliseconds;
  object["error"] = row.error;
  return object;
}

std::vector<ops::Bench> all_benches() {
  std::vector<ops::Bench> all = ops::benches();
  all.insert(all.end(), model::benches().begin(), model::benches().end());
  return all;
}

std::string known_names() {
  std::string names;
  for (const ops::Bench& bench : all_benches()) names += (names.empty() ? "" : ", ") + std::string(bench.name);
  return names;
}

void run_bench(const BenchArguments& arguments) {
  for (const std::string& name : arguments.names) {
    bool found = false;
    for (const ops::Bench& bench : all_benches()) found = found || name == bench.name;
    if (!found) throw Error("bench: unknown operator '" + name + "'; known: " + known_names());
  }
  testing::BenchOptions options;
  options.device = device_from_name(arguments.device);
  options.threads = arguments.threads;
  options.seconds = arguments.seconds;
  options.implementation = arguments.implementation;
  options.sweep = arguments.sweep;

  Ceilings ceilings;
  nlohmann::json rows = nlohmann::json::array();
  bool refused = false;
  if (!arguments.json) print_header();
  auto take = [&](const testing::BenchRow& row) {
    note_ceilings(row, ceilings);
    refused = refused || !row.refused.empty();
    if (arguments.json) {
      rows.push_back(to_json(row));
    } else {
      print_row(row, ceilings);
      std::fflush(stdout);
    }
  };
  for (const testing::BenchRow& row : ops::measure_ceilings(options)) take(row);
  for (const ops::Bench& bench : all_benches()) {
    bool wanted = arguments.names.empty();
    for (const std::string& name : arguments.names) wanted = wanted || name == bench.name;
    if (!wanted) continue;
    for (const testing::BenchRow& row : bench.run(options)) take(row);
  }
  if (arguments.json) fmt::print("{}\n", rows.dump(1));
  std::fflush(stdout);
  if (!arguments.peer.empty() && std::system(arguments.peer.c_str()) != 0) {
    throw Error("bench: the peer's command failed: " + arguments.peer);
  }
  if (refused) throw Error("bench: at least one implementation gave a wrong result and was not timed");
}

}  // namespace

void add_bench(CLI::App& app) {
  auto arguments = std::make_shared<BenchArguments>();
  CLI::App* verb = app.add_subcommand(
      "bench",
      "Times every implementation of the operators and of the model, and checks each against the float64 reference\n"
      "first: a wrong result gets no time. /GEMM: FLOP/s as a share of the machine's own fp32 1024^3 matrix product;\n"
      "/read: bytes per second as a share of its read bandwidth; /floor: share of the least possible time (GPU).\n"
      "All shares are of this run.\n"
      "Known: " +
          known_names());
  verb->add_option("operators", arguments->names, "What to time (default: everything)");
  verb->add_option("--device", arguments->device, "cpu or cuda[:N]")->capture_default_str();
  verb->add_option("--threads", arguments->threads, "CPU threads; 0: all")
      ->capture_default_str()
      ->check(non_negative_number());
  verb->add_option("--seconds", arguments->seconds, "Time spent on each figure")
      ->capture_default_str()
      ->check(positive_number());
  verb->add_option("--implementation", arguments->implementation, "Only the implementation of this name");
  verb->add_flag("--sweep", arguments->sweep, "A large grid of shapes instead of the headline cases");
  verb->add_flag("--json", arguments->json, "Print JSON instead of a table");
  verb->add_option("--peer", arguments->peer,
                   "A command that times a peer on the same inputs; run afterwards, same output");
  verb->callback([arguments] { run_bench(*arguments); });
}

}  // namespace flashgla::cli
