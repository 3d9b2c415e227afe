#pragma once

#include <vector>

#include "testing/bench.h"

namespace flashgla::ops::log_sigmoid_gate {

std::vector<testing::BenchRow> bench(const testing::BenchOptions& options);

}  // namespace flashgla::ops::log_sigmoid_gate
