// What a CUDA device can do at most, measured: the floors that `flashgla bench` quotes are made of these.
#pragma once

#include <vector>

#include "testing/bench.h"

namespace flashgla::bench {

// Rows kCopyCeiling, kTensorCeiling and kLaunchCeiling.
std::vector<testing::BenchRow> measure_cuda_ceilings(const testing::BenchOptions& options);

}  // namespace flashgla::bench
