#pragma once

#include "testing/bench.h"

namespace flashgla::ops::adamw {

void bench(const testing::BenchOptions& options);

}  // namespace flashgla::ops::adamw
