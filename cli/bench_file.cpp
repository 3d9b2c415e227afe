#include "cli/bench_file.h"

#include <algorithm>
#include <ctime>
#include <map>
#include <nlohmann/json.hpp>
#include <tuple>

#include "bench/benches.h"
#include "cli/commit.h"
#include "flashgla/base/context.h"
#include "flashgla/base/error.h"
#include "flashgla/base/file.h"
#include "flashgla/base/json.h"
#include "flashgla/base/memory.h"
#include "flashgla/base/names.h"

namespace flashgla::cli {

namespace {

using nlohmann::ordered_json;

ordered_json row_to_json(const testing::BenchRow& row, const Ceilings& ceilings) {
  ordered_json object = {
      {"operation", row.operation}, {"implementation", row.implementation}, {"problem", row.problem}};
  if (!row.refused.empty()) {
    object["refused"] = row.refused;
    return object;
  }
  object["milliseconds"] = row.milliseconds;
  object["flops"] = row.flops;
  object["bytes"] = row.bytes;
  if (row.exponentials > 0) object["exponentials"] = row.exponentials;
  if (const double floor = floor_milliseconds(row, ceilings); floor > 0) object["floor_milliseconds"] = floor;
  if (row.memory > 0) object["memory_bytes"] = row.memory;
  object["error"] = row.error;
  if (!row.plan.empty()) object["plan"] = row.plan;
  for (const testing::OperatorTime& each : row.operators) {
    object["operators"].push_back({{"operator", each.name},
                                   {"milliseconds", each.milliseconds},
                                   {"launches", each.launches},
                                   {"floor_milliseconds", floor_milliseconds(each, ceilings)}});
  }
  return object;
}

ordered_json all_to_json(const std::vector<testing::BenchRow>& rows, const Ceilings& ceilings) {
  ordered_json array = ordered_json::array();
  for (const testing::BenchRow& row : rows) array.push_back(row_to_json(row, ceilings));
  return array;
}

testing::BenchRow row_from_json(const ordered_json& object, const std::vector<testing::BenchRow>& ours) {
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
      row.exponentials = own.exponentials;
    }
  }
  row.flops = object.value("flops", row.flops);
  row.bytes = object.value("bytes", row.bytes);
  row.exponentials = object.value("exponentials", row.exponentials);
  row.memory = object.value("memory_bytes", 0.0);
  row.error = object.value("error", 0.0);
  row.plan = object.value("plan", std::string());
  return row;
}

std::vector<testing::BenchRow> rows_from(const ordered_json& array, const std::vector<testing::BenchRow>& ours) {
  std::vector<testing::BenchRow> rows;
  for (const ordered_json& object : array) rows.push_back(row_from_json(object, ours));
  return rows;
}

Ceilings ceilings_of(const BenchFile& file) {
  Ceilings ceilings{.cuda = device_from_name(file.device).kind == Device::Kind::cuda};
  for (const testing::BenchRow& row : file.rows) ceilings.note(row);
  return ceilings;
}

}  // namespace

void Ceilings::note(const testing::BenchRow& row) {
  const double seconds = row.milliseconds * 1e-3;
  if (seconds <= 0.0) return;
  if (row.operation == bench::kGemmCeiling || row.operation == bench::kTensorCeiling) flops = row.flops / seconds;
  if (row.operation == bench::kReadCeiling || row.operation == bench::kCopyCeiling) bandwidth = row.bytes / seconds;
  if (row.operation == bench::kExponentialCeiling) exponentials = row.exponentials / seconds;
  if (row.operation == bench::kLaunchCeiling) launch = seconds;
}

double floor_milliseconds(const testing::BenchRow& row, const Ceilings& ceilings) {
  if (ceilings.flops <= 0.0 || ceilings.bandwidth <= 0.0) return 0.0;
  if (row.flops <= 0.0 && row.bytes <= 0.0) return 0.0;
  const double exponentials = ceilings.exponentials > 0.0 ? row.exponentials / ceilings.exponentials : 0.0;
  return 1e3 * std::max({row.flops / ceilings.flops, row.bytes / ceilings.bandwidth, exponentials, ceilings.launch});
}

double floor_milliseconds(const testing::OperatorTime& part, const Ceilings& ceilings) {
  if (ceilings.flops <= 0.0 || ceilings.bandwidth <= 0.0) return 0.0;
  return 1e3 * std::max(part.flops / ceilings.flops, part.bytes / ceilings.bandwidth);
}

double share_of_floor(const testing::BenchRow& row, const Ceilings& ceilings) {
  return row.milliseconds > 0.0 ? floor_milliseconds(row, ceilings) / row.milliseconds : 0.0;
}

BenchFile describe_run(Device device, int threads, const std::string& command) {
  BenchFile file;
  file.device = name_of(device);
  file.machine = device_name(device);
  file.threads = Context(Device::cpu(), threads).threads();
  file.commit = source_commit();
  file.command = command;
  char date[16];
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  std::strftime(date, sizeof date, "%Y-%m-%d", ::gmtime_r(&now, &utc));
  file.date = date;
  return file;
}

std::string rows_to_json(const std::vector<testing::BenchRow>& rows, const Ceilings& ceilings) {
  return all_to_json(rows, ceilings).dump(1);
}

std::vector<testing::BenchRow> rows_from_json(const std::string& json, const std::string& source,
                                              const std::vector<testing::BenchRow>& ours) {
  try {
    return rows_from(ordered_json::parse(json), ours);
  } catch (const nlohmann::json::exception& error) {
    throw Error(source + " is not a JSON array of rows (" + json_reason(error) + ")");
  }
}

void save_bench_file(const std::string& path, const BenchFile& file) {
  const ordered_json object = {{"device", file.device},
                               {"machine", file.machine},
                               {"threads", file.threads},
                               {"commit", file.commit},
                               {"date", file.date},
                               {"command", file.command},
                               {"rows", all_to_json(file.rows, ceilings_of(file))}};
  write_file(path, object.dump(1) + "\n");
}

BenchFile load_bench_file(const std::string& path) {
  BenchFile file;
  try {
    const ordered_json object = ordered_json::parse(read_file(path));
    file.device = object.at("device").get<std::string>();
    file.machine = object.at("machine").get<std::string>();
    file.threads = object.at("threads").get<int>();
    file.commit = object.at("commit").get<std::string>();
    file.date = object.at("date").get<std::string>();
    file.command = object.at("command").get<std::string>();
    file.rows = rows_from(object.at("rows"), {});
  } catch (const nlohmann::json::exception& error) {
    throw Error(path + " is no file of `flashgla bench --save`: " + json_reason(error));
  }
  return file;
}

Comparison compare(const BenchFile& before, const BenchFile& now, double share) {
  const Ceilings then = ceilings_of(before), here = ceilings_of(now);
  if (then.cuda != here.cuda || (here.cuda && before.machine != now.machine)) {
    throw Error("bench: the figures to compare with are of " + before.machine + ", these of " + now.machine +
                (here.cuda ? "; milliseconds of other GPUs say nothing" : ""));
  }
  using Key = std::tuple<std::string, std::string, std::string>;
  std::map<Key, const testing::BenchRow*> earlier;
  for (const testing::BenchRow& row : before.rows) earlier[{row.operation, row.implementation, row.problem}] = &row;
  Comparison result;
  for (const testing::BenchRow& row : now.rows) {
    const auto found = earlier.find({row.operation, row.implementation, row.problem});
    if (found == earlier.end() || row.operation.starts_with("ceiling")) continue;
    Slower each{row, found->second->milliseconds, row.milliseconds, 0.0};
    if (!here.cuda) {
      each.before = share_of_floor(*found->second, then);
      each.now = share_of_floor(row, here);
    }
    if (each.before <= 0.0 || each.now <= 0.0) continue;
    each.loss = (here.cuda ? each.now / each.before : each.before / each.now) - 1.0;
    ++result.compared;
    if (each.loss > share) result.slower.push_back(each);
  }
  std::stable_sort(result.slower.begin(), result.slower.end(),
                   [](const Slower& a, const Slower& b) { return a.loss > b.loss; });
  return result;
}

}  // namespace flashgla::cli
