#pragma once

#include "testing/bench.h"

namespace flashgla::ops::rms_norm {

void bench(const testing::BenchOptions& options);

}  // namespace flashgla::ops::rms_norm
