// flashgla bench: times every implementation of the operators and the model, beside the floor.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench/benches.h"
#include "bench/kernel_times.h"
#include "cli/bench_file.h"
#include "cli/checks.h"
#include "cli/say.h"
#include "cli/verbs.h"
#include "flashgla/base/error.h"
#include "flashgla/base/names.h"

namespace flashgla::cli {

namespace {

struct BenchArguments {
  std::vector<std::string> names;
  std::string device = "cpu";
  std::string implementation;
  std::string peer;
  std::string only;
  std::vector<int> threads = {0};
  double seconds = 0.5;
  bool sweep = false;
  bool kernels = false;
  bool json = false;
  std::string save;
  std::string compare;
  double compare_share = 0.1;
};

void print_header(const Ceilings& ceilings) {
  print("{:<49} {:<16} {:<44} {:>9} ", "operation", "implementation", "problem", "ms");
  if (ceilings.cuda) {
    print("{:>8} {:>7} {:>7} {:>8} {:>9}\n", "TFLOP/s", "TB/s", "/floor", "MiB", "error");
  } else {
    print("{:>9} {:>8} {:>7} {:>7} {:>9}\n", "GFLOP/s", "GB/s", "/GEMM", "/read", "error");
  }
}

void print_row(const testing::BenchRow& row, const Ceilings& ceilings) {
  print("{:<49} {:<16} {:<44} ", row.operation, row.implementation, row.problem);
  if (!row.refused.empty()) {
    print("refused: {}\n", row.refused);
    return;
  }
  const double seconds = row.milliseconds * 1e-3;
  auto cell = [](double value, int width, int digits) {
    return value > 0.0 ? fmt::format("{:>{}.{}f}", value, width, digits) : fmt::format("{:>{}}", "-", width);
  };
  const double flops = seconds > 0.0 ? row.flops / seconds : 0.0;
  const double bytes = seconds > 0.0 ? row.bytes / seconds : 0.0;
  const std::string milliseconds = cell(row.milliseconds, 9, row.milliseconds < 10 ? 4 : 2);
  const std::string error = row.error > 0.0 ? fmt::format("{:>9.1e}", row.error) : fmt::format("{:>9}", "-");
  if (ceilings.cuda) {
    print("{} {} {} {} {} {}", milliseconds, cell(flops * 1e-12, 8, 1), cell(bytes * 1e-12, 7, 2),
          cell(share_of_floor(row, ceilings), 7, 2), cell(row.memory / 1048576.0, 8, 0), error);
  } else {
    print("{} {} {} {} {} {}", milliseconds, cell(flops * 1e-9, 9, 1), cell(bytes * 1e-9, 8, 1),
          cell(ceilings.flops > 0 ? flops / ceilings.flops : 0.0, 7, 2),
          cell(ceilings.bandwidth > 0 ? bytes / ceilings.bandwidth : 0.0, 7, 2), error);
  }
  print("{}{}\n", row.plan.empty() ? "" : "  ", row.plan);
  double kernels = 0.0;
  for (const testing::OperatorTime& each : row.operators) kernels += each.milliseconds;
  for (const testing::OperatorTime& each : row.operators) {
    const double floor = floor_milliseconds(each, ceilings);
    print("  {:<24} {:>9.4f} ms {:>6.1f}% {:>7.1f} launches{}\n", each.name, each.milliseconds,
          100.0 * each.milliseconds / kernels, each.launches,
          floor > 0.0 ? fmt::format(", {:.2f} of its floor", floor / each.milliseconds) : "");
  }
}

// Runs the peer's command: our rows as JSON on its standard input, its rows as JSON from its standard output.
std::vector<testing::BenchRow> run_peer(const std::string& command, const std::vector<testing::BenchRow>& ours,
                                        const Ceilings& ceilings) {
  const std::string text = rows_to_json(ours, ceilings);
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> input(std::tmpfile(), std::fclose);
  if (!input || std::fwrite(text.data(), 1, text.size(), input.get()) != text.size() || std::fflush(input.get()) != 0 ||
      std::fseek(input.get(), 0, SEEK_SET) != 0) {
    throw Error("bench: no temporary file for the peer's input");
  }
  const std::string redirected = "{ " + command + "\n} </dev/fd/" + std::to_string(fileno(input.get()));
  std::FILE* output = popen(redirected.c_str(), "r");
  if (output == nullptr) throw Error("bench: cannot start the peer's command: " + command);
  std::string answer;
  char block[4096];
  for (std::size_t n = 0; (n = std::fread(block, 1, sizeof(block), output)) > 0;) answer.append(block, n);
  if (pclose(output) != 0) throw Error("bench: the peer's command failed: " + command);
  return rows_from_json(answer, "bench: the peer's output", ours);
}

// By operation, the row that is furthest from its floor.
void print_worst(const std::vector<testing::BenchRow>& rows, const Ceilings& ceilings) {
  std::map<std::string, const testing::BenchRow*> worst;
  for (const testing::BenchRow& row : rows) {
    const double share = share_of_floor(row, ceilings);
    if (share <= 0.0 || row.operation.starts_with("ceiling")) continue;
    const testing::BenchRow*& least = worst[row.operation];
    if (least == nullptr || share < share_of_floor(*least, ceilings)) least = &row;
  }
  for (const auto& [operation, row] : worst) {
    print("furthest from its floor, {}: {} on {}, {:.3f} of the floor\n", operation, row->problem, row->implementation,
          share_of_floor(*row, ceilings));
  }
}

std::string known_names() {
  std::string names;
  for (const bench::Bench& one : bench::benches()) names += (names.empty() ? "" : ", ") + std::string(one.name);
  return names;
}

// What to type for the same run again.
std::string command_of(const BenchArguments& arguments) {
  std::string command = "flashgla bench";
  for (const std::string& name : arguments.names) command += " " + name;
  if (arguments.device != "cpu") command += " --device " + arguments.device;
  if (arguments.threads.front() != 0) command += " --threads " + std::to_string(arguments.threads.front());
  command += fmt::format(" --seconds {}", arguments.seconds);
  if (!arguments.implementation.empty()) command += " --implementation " + arguments.implementation;
  if (!arguments.only.empty()) command += " --only '" + arguments.only + "'";
  if (arguments.sweep) command += " --sweep";
  if (arguments.kernels) command += " --kernels";
  if (!arguments.peer.empty()) command += " --peer '" + arguments.peer + "'";
  return command;
}

// Says what became slower. Throws Error when something did.
void report_comparison(const BenchArguments& arguments, const BenchFile& before, const BenchFile& now) {
  const Comparison comparison = compare(before, now, arguments.compare_share);
  const bool cuda = now.device != "cpu";
  print("compared with {} ({}, {}, {}), {}:\n", arguments.compare, before.machine, before.commit, before.date,
        cuda ? "milliseconds" : "shares of the floor that each run's ceilings give");
  for (const Slower& each : comparison.slower) {
    print("slower: {} {} {}: {:.4g} -> {:.4g}{} ({:.0f}% more time)\n", each.row.operation, each.row.implementation,
          each.row.problem, each.before, each.now, cuda ? " ms" : "", 100.0 * each.loss);
  }
  print("{} rows compared, {} slower by more than {:g}%\n", comparison.compared, comparison.slower.size(),
        100.0 * arguments.compare_share);
  std::fflush(stdout);
  if (comparison.compared == 0) throw Error("bench: " + arguments.compare + " has none of the rows of this run");
  if (!comparison.slower.empty()) {
    throw Error(fmt::format("bench: {} of {} rows became slower by more than {:g}%", comparison.slower.size(),
                            comparison.compared, 100.0 * arguments.compare_share));
  }
}

void run_wanted(const BenchArguments& arguments, const testing::BenchOptions& options) {
  for (const bench::Bench& one : bench::benches()) {
    const auto& names = arguments.names;
    if (names.empty() || std::find(names.begin(), names.end(), one.name) != names.end()) one.run(options);
  }
}

// The same rows with one number of threads after the other: milliseconds, in brackets as a share of the floor that the
// ceilings with as many threads give, and last the most time that more threads took over the best with fewer.
void print_scaling(const BenchArguments& arguments, testing::BenchOptions options) {
  if (arguments.json || !arguments.save.empty() || !arguments.compare.empty() || !arguments.peer.empty()) {
    throw Error("bench: several numbers of --threads go without --json, --save, --compare and --peer");
  }
  struct Line {
    std::string what;
    std::vector<double> milliseconds, shares;
  };
  std::vector<Line> lines;
  const auto add = [&](const testing::BenchRow& row, std::size_t column, double share) {
    const std::string what = row.operation + " " + row.implementation + " " + row.problem;
    auto line = std::find_if(lines.begin(), lines.end(), [&](const Line& one) { return one.what == what; });
    if (line == lines.end()) line = lines.insert(line, {what, {}, {}});
    line->milliseconds.resize(arguments.threads.size());
    line->shares.resize(arguments.threads.size());
    line->milliseconds[column] = row.milliseconds;
    line->shares[column] = share;
  };
  for (std::size_t i = 0; i < arguments.threads.size(); ++i) {
    options.threads = arguments.threads[i];
    Ceilings ceilings;
    for (const testing::BenchRow& row : bench::measure_ceilings(options)) {
      ceilings.note(row);
      add(row, i, 1.0);
    }
    options.report = [&](const testing::BenchRow& row) {
      if (!row.refused.empty()) throw Error("bench: " + row.operation + " " + row.problem + ": " + row.refused);
      add(row, i, share_of_floor(row, ceilings));
    };
    run_wanted(arguments, options);
  }
  print("{:<76}", "milliseconds (share of the floor) by threads");
  for (const int threads : arguments.threads) print("{:>17}", threads);
  print("{:>12}\n", "over fewer");
  for (const Line& line : lines) {
    print("{:<76}", line.what);
    double best = 0.0, worst = 0.0;
    for (std::size_t i = 0; i < line.milliseconds.size(); ++i) {
      const double now = line.milliseconds[i];
      print("{:>17}", fmt::format("{:.{}f} ({:.2f})", now, now < 10 ? 3 : 1, line.shares[i]));
      if (best > 0.0) worst = std::max(worst, now / best);
      best = best > 0.0 ? std::min(best, now) : now;
    }
    print("{:>12.2f}\n", worst);
  }
}

void run_bench(const BenchArguments& arguments) {
  for (const std::string& name : arguments.names) {
    bool found = false;
    for (const bench::Bench& one : bench::benches()) found = found || name == one.name;
    if (!found) throw Error("bench: unknown operator '" + name + "'; known: " + known_names());
  }
  testing::BenchOptions options;
  options.device = device_from_name(arguments.device);
  options.threads = arguments.threads.front();
  options.seconds = arguments.seconds;
  options.implementation = arguments.implementation;
  options.only = arguments.only;
  options.sweep = arguments.sweep;
  options.kernels = arguments.kernels;
  if (options.kernels) bench::require_kernel_times(options.device);

  if (arguments.threads.size() > 1) return print_scaling(arguments, options);
  const std::optional<BenchFile> before =
      arguments.compare.empty() ? std::nullopt : std::optional(load_bench_file(arguments.compare));
  Ceilings ceilings{.cuda = options.device.kind == Device::Kind::cuda};
  bool refused = false;
  const std::vector<testing::BenchRow> measured =
      bench::measure_ceilings(options);  // refuses a device that is not there
  for (const testing::BenchRow& row : measured) ceilings.note(row);
  BenchFile file = describe_run(options.device, options.threads, command_of(arguments));
  std::vector<testing::BenchRow>& rows = file.rows;
  auto take = [&](const testing::BenchRow& row) {
    refused = refused || !row.refused.empty();
    rows.push_back(row);
    if (!arguments.save.empty()) save_bench_file(arguments.save, file);
    if (arguments.json) return;
    if (rows.size() == 1) print_header(ceilings);
    print_row(row, ceilings);
    std::fflush(stdout);
  };
  options.report = [&](const testing::BenchRow& row) {
    if (rows.empty()) std::for_each(measured.begin(), measured.end(), take);  // not before there is one to compare
    take(row);
  };
  run_wanted(arguments, options);
  if (rows.empty()) {
    throw Error("bench: nothing to time on " + name_of(options.device) +
                (arguments.only.empty() ? "" : " with --only '" + arguments.only + "'") +
                (arguments.implementation.empty() ? "" : " with --implementation '" + arguments.implementation + "'"));
  }
  if (!arguments.peer.empty()) {
    const std::vector<testing::BenchRow> ours = rows;
    for (const testing::BenchRow& row : run_peer(arguments.peer, ours, ceilings)) take(row);
  }
  if (arguments.json) {
    print("{}\n", rows_to_json(rows, ceilings));
  } else if (arguments.sweep) {
    print_worst(rows, ceilings);
  }
  std::fflush(stdout);
  if (refused) throw Error("bench: at least one implementation gave a wrong result and was not timed");
  if (before) report_comparison(arguments, *before, file);
}

}  // namespace

void add_bench(CLI::App& app) {
  auto arguments = std::make_shared<BenchArguments>();
  CLI::App* verb = app.add_subcommand(
      "bench",
      "Times every implementation of the operators and of the model, and checks each against the float64 reference\n"
      "first: a wrong result gets no time. /GEMM: FLOP/s as a share of the machine's own fp32 1024^3 matrix product;\n"
      "/read: bytes per second as a share of its read bandwidth. On CUDA, /floor: the least possible time as a share "
      "of\n"
      "the measured one, the longest of the bytes at the copy bandwidth, the FLOPs at the rate of the tensor cores "
      "and\n"
      "one launch; MiB: outputs, gradients and workspace. All shares are of ceilings measured in this run.\n"
      "Known: " +
          known_names());
  verb->add_option("operators", arguments->names, "What to time (default: everything)");
  verb->add_option("--device", arguments->device, "cpu or cuda[:N]")->capture_default_str();
  verb->add_option("--threads", arguments->threads,
                   "CPU threads; 0: all. Several, such as 1,2,4,8: a table of how each row scales")
      ->delimiter(',')
      ->allow_extra_args(false)  // what follows is an operator
      ->capture_default_str()
      ->transform(thread_count());
  verb->add_option("--seconds", arguments->seconds, "Time spent on each figure")
      ->capture_default_str()
      ->check(positive_number());
  verb->add_option("--implementation", arguments->implementation, "Only the implementation of this name");
  verb->add_option("--only", arguments->only, "Only problems whose description contains this, such as 'K64 V64'");
  verb->add_flag("--sweep", arguments->sweep, "A large grid of shapes instead of the headline cases");
  verb->add_flag("--kernels", arguments->kernels,
                 "Behind each row of a whole model: which operators' kernels its time went to, and the share of its\n"
                 "floor that each reached. CUDA, with CUPTI, which comes with the toolkit");
  verb->add_flag("--json", arguments->json, "Print JSON instead of a table");
  verb->add_option("--save", arguments->save,
                   "A file to write the rows to as JSON, with machine, commit and date, besides what is "
                   "printed");
  verb->add_option(
          "--compare", arguments->compare,
          "A file of --save (docs/figures/): says which rows became slower than there, and fails when one did.\n"
          "By milliseconds on a GPU, which must be of the same name; on a CPU by shares of the ceilings")
      ->check(CLI::ExistingFile);
  verb->add_option("--compare-share", arguments->compare_share, "How much more time a row may take: 0.1 is a tenth")
      ->capture_default_str()
      ->check(non_negative_number())
      ->needs("--compare");
  verb->add_option(
      "--peer", arguments->peer,
      "A command that times peers: gets our rows as JSON on its standard input and prints its own as a JSON\n"
      "array of the same form, which join the table (scripts/torch_peers.py, of models scripts/model_peers.py)");
  verb->callback([arguments] { run_bench(*arguments); });
}

}  // namespace flashgla::cli
