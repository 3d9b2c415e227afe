// The list of benches that `flashgla bench` walks: one row an operator, in the operator's folder.
#pragma once

#include <vector>

#include "testing/bench.h"

namespace flashgla::ops {

struct Bench {
  const char* name;  // the operator's folder
  std::vector<testing::BenchRow> (*run)(const testing::BenchOptions&);
};

const std::vector<Bench>& benches();

}  // namespace flashgla::ops
