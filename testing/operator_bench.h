// Benches of operators that conformance.h can describe: every implementation is checked on a small case, then timed.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "testing/bench.h"
#include "testing/conformance.h"

namespace flashgla::testing {

struct OperatorBench {
  std::string operation;  // "rms_norm forward"
  std::string problem;    // "4096x1024 f32"
  OperatorCase timed;     // one pair of dtypes
  OperatorCase checked;   // the same in small, so that the reference takes no time
  double flops = 0.0;
  double bytes = 0.0;         // that must move, each tensor once
  double exponentials = 0.0;  // that must be computed
  // Copies of all tensors, used in turn, so that inputs come from memory and not from a cache that the last run filled.
  int copies = 1;
  // After a dry run and before the runs that are timed: what a program does once before its steps.
  std::function<void(Context&)> prepare{};
};

// A bench of an operator that is bound by bytes: each tensor of `timed` moves once, those that are changed in place
// twice.
OperatorBench bytes_bound(const std::string& operation, const std::string& problem, DTypePair dtypes,
                          const OperatorCase& timed, const OperatorCase& checked);

struct ShapedOperation {
  const char* name;
  std::function<OperatorCase(const Shape&)> of;
};
// Such benches of operations at `shape`, in f32 and in bf16.
std::vector<OperatorBench> bytes_bound(const std::vector<ShapedOperation>& operations, const Shape& shape,
                                       const Shape& checked);

// Reports a row for each bench and implementation of the table that supports the case, but for the reference, unless it
// is asked for.
void run_benches(const std::vector<OperatorBench>& benches, const std::vector<std::string>& implementations,
                 const BenchOptions& options);

// Names of a table's rows.
template <class Implementations>
std::vector<std::string> names_of(const Implementations& implementations) {
  std::vector<std::string> names;
  for (const auto& row : implementations) names.push_back(row.name);
  return names;
}

// Enough copies to be far beyond any cache.
int copies_beyond_cache(double bytes);

}  // namespace flashgla::testing
