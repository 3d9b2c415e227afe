// flashgla bench: times every implementation of the operators and the model, beside the floor.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/benches.h"
#include "cli/checks.h"
#include "cli/verbs.h"
#include "flashgla/base/error.h"
#include "flashgla/base/file.h"
#include "flashgla/base/names.h"

namespace flashgla::cli {

namespace {

struct BenchArguments {
  std::vector<std::string> names;
  std::string device = "cpu";
  std::string implementation;
  std::string peer;
  std::string only;
  int threads = 0;
  double seconds = 0.5;
  bool sweep = false;
  bool json = false;
  std::string save;
};

// The rows that other rows are compared with, when they are of the same run.
struct Ceilings {
  bool cuda = false;
  double flops = 0.0;      // FLOP/s: of the vendor's fp32 product of 1024^3 on the CPU, of bf16 products on CUDA
  double bandwidth = 0.0;  // bytes/s: read on the CPU, copied on CUDA (read + written)
  double launch = 0.0;     // seconds of an empty kernel; 0 on the CPU
};

void note_ceilings(const testing::BenchRow& row, Ceilings& ceilings) {
  const double seconds = row.milliseconds * 1e-3;
  if (seconds <= 0.0) return;
  if (row.operation == bench::kGemmCeiling || row.operation == bench::kTensorCeiling)
    ceilings.flops = row.flops / seconds;
  if (row.operation == bench::kReadCeiling || row.operation == bench::kCopyCeiling)
    ceilings.bandwidth = row.bytes / seconds;
  if (row.operation == bench::kLaunchCeiling) ceilings.launch = seconds;
}

// The least time that a row can take on CUDA, by the ceilings measured in this run; 0: unknown.
double floor_milliseconds(const testing::BenchRow& row, const Ceilings& ceilings) {
  if (!ceilings.cuda || ceilings.flops <= 0.0 || ceilings.bandwidth <= 0.0) return 0.0;
  if (row.flops <= 0.0 && row.bytes <= 0.0) return 0.0;
  return 1e3 * std::max({row.flops / ceilings.flops, row.bytes / ceilings.bandwidth, ceilings.launch});
}

double share_of_floor(const testing::BenchRow& row, const Ceilings& ceilings) {
  return row.milliseconds > 0.0 ? floor_milliseconds(row, ceilings) / row.milliseconds : 0.0;
}

void print_header(const Ceilings& ceilings) {
  fmt::print("{:<49} {:<16} {:<44} {:>9} ", "operation", "implementation", "problem", "ms");
  if (ceilings.cuda) {
    fmt::print("{:>8} {:>7} {:>7} {:>8} {:>9}\n", "TFLOP/s", "TB/s", "/floor", "MiB", "error");
  } else {
    fmt::print("{:>9} {:>8} {:>7} {:>7} {:>9}\n", "GFLOP/s", "GB/s", "/GEMM", "/read", "error");
  }
}

void print_row(const testing::BenchRow& row, const Ceilings& ceilings) {
  fmt::print("{:<49} {:<16} {:<44} ", row.operation, row.implementation, row.problem);
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
  const std::string milliseconds = cell(row.milliseconds, 9, row.milliseconds < 10 ? 4 : 2);
  const std::string error = row.error > 0.0 ? fmt::format("{:>9.1e}", row.error) : fmt::format("{:>9}", "-");
  if (ceilings.cuda) {
    fmt::print("{} {} {} {} {} {}\n", milliseconds, cell(flops * 1e-12, 8, 1), cell(bytes * 1e-12, 7, 2),
               cell(share_of_floor(row, ceilings), 7, 2), cell(row.memory / 1048576.0, 8, 0), error);
  } else {
    fmt::print("{} {} {} {} {} {}\n", milliseconds, cell(flops * 1e-9, 9, 1), cell(bytes * 1e-9, 8, 1),
               cell(ceilings.flops > 0 ? flops / ceilings.flops : 0.0, 7, 2),
               cell(ceilings.bandwidth > 0 ? bytes / ceilings.bandwidth : 0.0, 7, 2), error);
  }
}

nlohmann::json to_json(const testing::BenchRow& row, const Ceilings& ceilings) {
  nlohmann::json object = {
      {"operation", row.operation}, {"implementation", row.implementation}, {"problem", row.problem}};
  if (!row.refused.empty()) {
    object["refused"] = row.refused;
    return object;
  }
  object["milliseconds"] = row.milliseconds;
  object["flops"] = row.flops;
  object["bytes"] = row.bytes;
  if (const double floor = floor_milliseconds(row, ceilings); floor > 0) object["floor_milliseconds"] = floor;
  if (row.memory > 0) object["memory_bytes"] = row.memory;
  object["error"] = row.error;
  return object;
}

nlohmann::json all_to_json(const std::vector<testing::BenchRow>& rows, const Ceilings& ceilings) {
  nlohmann::json array = nlohmann::json::array();
  for (const testing::BenchRow& row : rows) array.push_back(to_json(row, ceilings));
  return array;
}

// A row as to_json writes it, from a peer. FLOPs and bytes that it leaves out are taken from our row of the same
// operation and problem, so that shares compare.
testing::BenchRow from_peer(const nlohmann::json& object, const std::vector<testing::BenchRow>& ours) {
  testing::BenchRow row;
  row.operation = object.at("operation").get<std::string>();
  row.implementation = object.at("implementation").get<std::string>();
  row.problem = object.at("problem").get<std::string>();
  if (object.contains("refused")) {
    row.refused = object.at("refused").get<std::string>();
    return row;
  }
  row.milliseconds = object.at("milliseconds").get<double>();
  for (const testing::BenchRow& own : ours) {
    if (own.operation == row.operation && own.problem == row.problem) {
      row.flops = own.flops;
      row.bytes = own.bytes;
    }
  }
  row.flops = object.value("flops", row.flops);
  row.bytes = object.value("bytes", row.bytes);
  row.memory = object.value("memory_bytes", 0.0);
  row.error = object.value("error", 0.0);
  return row;
}

// Runs the peer's command: our rows as JSON on its standard input, its rows as JSON from its standard output.
std::vector<testing::BenchRow> run_peer(const std::string& command, const std::vector<testing::BenchRow>& ours,
                                        const Ceilings& ceilings) {
  const std::string text = all_to_json(ours, ceilings).dump();
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
  std::vector<testing::BenchRow> peers;
  try {
    for (const nlohmann::json& object : nlohmann::json::parse(answer)) peers.push_back(from_peer(object, ours));
  } catch (const nlohmann::json::exception& error) {
    throw Error("bench: the peer's output is not a JSON array of rows (" + std::string(error.what()) + "): " + command);
  }
  return peers;
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
    fmt::print("furthest from its floor, {}: {} on {}, {:.3f} of the floor\n", operation, row->problem,
               row->implementation, share_of_floor(*row, ceilings));
  }
}

std::string known_names() {
  std::string names;
  for (const bench::Bench& one : bench::benches()) names += (names.empty() ? "" : ", ") + std::string(one.name);
  return names;
}

void run_bench(const BenchArguments& arguments) {
  for (const std::string& name : arguments.names) {
    bool found = false;
    for (const bench::Bench& one : bench::benches()) found = found || name == one.name;
    if (!found) throw Error("bench: unknown operator '" + name + "'; known: " + known_names());
  }
  testing::BenchOptions options;
  options.device = device_from_name(arguments.device);
  options.threads = arguments.threads;
  options.seconds = arguments.seconds;
  options.implementation = arguments.implementation;
  options.only = arguments.only;
  options.sweep = arguments.sweep;

  Ceilings ceilings{.cuda = options.device.kind == Device::Kind::cuda};
  std::vector<testing::BenchRow> rows;
  bool refused = false;
  const std::vector<testing::BenchRow> measured =
      bench::measure_ceilings(options);  // refuses a device that is not there
  for (const testing::BenchRow& row : measured) note_ceilings(row, ceilings);
  auto take = [&](const testing::BenchRow& row) {
    refused = refused || !row.refused.empty();
    rows.push_back(row);
    if (!arguments.save.empty()) write_file(arguments.save, all_to_json(rows, ceilings).dump(1) + "\n");
    if (arguments.json) return;
    if (rows.size() == 1) print_header(ceilings);
    print_row(row, ceilings);
    std::fflush(stdout);
  };
  options.report = [&](const testing::BenchRow& row) {
    if (rows.empty()) std::for_each(measured.begin(), measured.end(), take);  // not before there is one to compare
    take(row);
  };
  for (const bench::Bench& one : bench::benches()) {
    bool wanted = arguments.names.empty();
    for (const std::string& name : arguments.names) wanted = wanted || name == one.name;
    if (!wanted) continue;
    one.run(options);
  }
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
    fmt::print("{}\n", all_to_json(rows, ceilings).dump(1));
  } else if (arguments.sweep) {
    print_worst(rows, ceilings);
  }
  std::fflush(stdout);
  if (refused) throw Error("bench: at least one implementation gave a wrong result and was not timed");
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
  verb->add_option("--threads", arguments->threads, "CPU threads; 0: all")
      ->capture_default_str()
      ->check(non_negative_number());
  verb->add_option("--seconds", arguments->seconds, "Time spent on each figure")
      ->capture_default_str()
      ->check(positive_number());
  verb->add_option("--implementation", arguments->implementation, "Only the implementation of this name");
  verb->add_option("--only", arguments->only, "Only problems whose description contains this, such as 'K64 V64'");
  verb->add_flag("--sweep", arguments->sweep, "A large grid of shapes instead of the headline cases");
  verb->add_flag("--json", arguments->json, "Print JSON instead of a table");
  verb->add_option("--save", arguments->save, "A file to write the rows to as JSON, besides what is printed");
  verb->add_option(
      "--peer", arguments->peer,
      "A command that times peers: gets our rows as JSON on its standard input and prints its own as a JSON\n"
      "array of the same form, which join the table (scripts/torch_peers.py)");
  verb->callback([arguments] { run_bench(*arguments); });
}

}  // namespace flashgla::cli
