// Rows of `flashgla bench gated_linear_attention`.
#pragma once

#include "testing/bench.h"

namespace flashgla::ops::gated_linear_attention {

// Every implementation of the device over the shared cases: forward, forward and backward, step.
void bench(const testing::BenchOptions& options);

}  // namespace flashgla::ops::gated_linear_attention
