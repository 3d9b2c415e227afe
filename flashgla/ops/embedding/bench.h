#pragma once

#include "testing/bench.h"

namespace flashgla::ops::embedding {

void bench(const testing::BenchOptions& options);

}  // namespace flashgla::ops::embedding
