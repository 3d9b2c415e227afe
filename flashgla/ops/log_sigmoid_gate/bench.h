#pragma once

#include "testing/bench.h"

namespace flashgla::ops::log_sigmoid_gate {

void bench(const testing::BenchOptions& options);

}  // namespace flashgla::ops::log_sigmoid_gate
