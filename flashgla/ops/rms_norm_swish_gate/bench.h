#pragma once

#include "testing/bench.h"

namespace flashgla::ops::rms_norm_swish_gate {

void bench(const testing::BenchOptions& options);

}  // namespace flashgla::ops::rms_norm_swish_gate
