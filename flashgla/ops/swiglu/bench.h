#pragma once

#include "testing/bench.h"

namespace flashgla::ops::swiglu {

void bench(const testing::BenchOptions& options);

}  // namespace flashgla::ops::swiglu
