#pragma once

#include "testing/bench.h"

namespace flashgla::ops::cross_entropy {

void bench(const testing::BenchOptions& options);

}  // namespace flashgla::ops::cross_entropy
