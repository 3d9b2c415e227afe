#pragma once

#include "testing/bench.h"

namespace flashgla::ops::matmul {

void bench(const testing::BenchOptions& options);

}  // namespace flashgla::ops::matmul
