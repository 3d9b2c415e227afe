#pragma once

#include <vector>

#include "testing/bench.h"

namespace flashgla::ops::global_norm {

std::vector<testing::BenchRow> bench(const testing::BenchOptions& options);

}  // namespace flashgla::ops::global_norm
