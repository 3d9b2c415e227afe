#pragma once

#include "testing/bench.h"

namespace flashgla::ops::short_convolution {

void bench(const testing::BenchOptions& options);

}  // namespace flashgla::ops::short_convolution
