#pragma once

#include "testing/bench.h"

namespace flashgla::ops::global_norm {

void bench(const testing::BenchOptions& options);

}  // namespace flashgla::ops::global_norm
