#include "testing/operator_bench.h"

#include <algorithm>
#include <cmath>

#include "flashgla/base/error.h"

namespace flashgla::testing {

namespace {

constexpr double kBeyondCache = 256e6;  // bytes: of any

void run_bench(const OperatorBench& bench, const std::vector<std::string>& implementations,
               const BenchOptions& options) {
  const DTypePair dtypes = bench.timed.dtypes.front();
  // On a device, where the copies are more than its cache holds, as many runs behind one another as move kTogether
  // bytes, all copies the same number of times.
  constexpr double kTogether = 2e9;
  const int runs = bench.copies * bench.bytes < kBeyondCache
                       ? 1
                       : static_cast<int>(std::clamp(std::ceil(kTogether / bench.bytes), 1.0, 64.0));
  const int together = (runs + bench.copies - 1) / bench.copies * bench.copies;
  std::vector<PreparedCase> copies;
  for (const std::string& name : implementations) {
    if (!options.wants_implementation(name)) continue;
    BenchRow row;
    row.operation = bench.operation;
    row.implementation = name;
    row.problem = bench.problem;
    row.flops = bench.flops;
    row.bytes = bench.bytes;
    row.exponentials = bench.exponentials;
    Context context(options.device, options.threads);
    context.force_implementation(name);
    try {
      row.refused = check_once(bench.checked, dtypes, options.device, name, &row.error);
      if (row.refused.empty()) {
        while (static_cast<int>(copies.size()) < bench.copies) {
          copies.push_back(copies.empty() ? PreparedCase(bench.timed, dtypes, options.device)
                                          : copies.front().duplicate());
        }
        context.scratch().begin_planning();
        copies.front().run(context);
        context.scratch().commit_plan();
        if (bench.prepare) bench.prepare(context);
        std::size_t next = 0;
        row.milliseconds = median_milliseconds_of(
            context,
            [&] {
              copies[next].run(context);
              next = (next + 1) % copies.size();
            },
            together, options.seconds);
      }
    } catch (const Error& error) {
      if (std::string(error.what()).find("no implementation fits") != std::string::npos) continue;
      row.refused = error.what();
    }
    options.report(row);
  }
}

}  // namespace

void run_benches(const std::vector<OperatorBench>& benches, const std::vector<std::string>& implementations,
                 const BenchOptions& options) {
  for (const OperatorBench& bench : benches) {
    if (options.wants(bench.problem)) run_bench(bench, implementations, options);
  }
}

OperatorBench bytes_bound(const std::string& operation, const std::string& problem, DTypePair dtypes,
                          const OperatorCase& timed, const OperatorCase& checked) {
  OperatorBench bench{operation, problem, timed, checked};
  bench.timed.dtypes = bench.checked.dtypes = {dtypes};
  for (const Argument& argument : timed.arguments) {
    const double passes = argument.role == Role::accumulated ? 2.0 : 1.0;
    bench.bytes +=
        passes * static_cast<double>(argument.shape.numel()) * static_cast<double>(size_of(dtype_of(argument, dtypes)));
  }
  bench.copies = copies_beyond_cache(bench.bytes);
  return bench;
}

std::vector<OperatorBench> bytes_bound(const std::vector<ShapedOperation>& operations, const Shape& shape,
                                       const Shape& checked) {
  std::vector<OperatorBench> benches;
  for (const DTypePair dtypes : f32_and_bf16()) {
    for (const ShapedOperation& operation : operations) {
      benches.push_back(bytes_bound(operation.name, to_string(shape) + " " + name_of(dtypes.activation), dtypes,
                                    operation.of(shape), operation.of(checked)));
    }
  }
  return benches;
}

int copies_beyond_cache(double bytes) {
  return static_cast<int>(std::clamp(std::ceil(kBeyondCache / std::max(bytes, 1.0)), 1.0, 256.0));
}

}  // namespace flashgla::testing
