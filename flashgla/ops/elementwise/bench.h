#pragma once

#include "testing/bench.h"

namespace flashgla::ops::elementwise {

void bench(const testing::BenchOptions& options);

}  // namespace flashgla::ops::elementwise
