// Rows of `flashgla bench gated_linear_attention`.
#pragma once

#include <vector>

#include "testing/bench.h"

namespace flashgla::ops::gated_linear_attention {

// Every implementation of the device over the shared cases: forward, forward and backward, step.
std::vector<testing::BenchRow> bench(const testing::BenchOptions& options);

}  // namespace flashgla::ops::gated_linear_attention
