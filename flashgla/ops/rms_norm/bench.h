#pragma once

#include <vector>

#include "testing/bench.h"

namespace flashgla::ops::rms_norm {

std::vector<testing::BenchRow> bench(const testing::BenchOptions& options);

}  // namespace flashgla::ops::rms_norm
