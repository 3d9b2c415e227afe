#pragma once

#include <vector>

#include "testing/bench.h"

namespace flashgla::ops::short_convolution {

std::vector<testing::BenchRow> bench(const testing::BenchOptions& options);

}  // namespace flashgla::ops::short_convolution
