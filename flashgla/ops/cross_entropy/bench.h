#pragma once

#include <vector>

#include "testing/bench.h"

namespace flashgla::ops::cross_entropy {

std::vector<testing::BenchRow> bench(const testing::BenchOptions& options);

}  // namespace flashgla::ops::cross_entropy
