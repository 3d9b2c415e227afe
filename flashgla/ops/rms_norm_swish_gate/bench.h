#pragma once

#include <vector>

#include "testing/bench.h"

namespace flashgla::ops::rms_norm_swish_gate {

std::vector<testing::BenchRow> bench(const testing::BenchOptions& options);

}  // namespace flashgla::ops::rms_norm_swish_gate
