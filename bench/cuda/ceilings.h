// What a CUDA device can do at most, measured: the floors that `flashgla bench` quotes are made of these.
#pragma once

#include <string>
#include <vector>

#include "testing/bench.h"

namespace flashgla::bench {

// The card by name, compute capability, multiprocessors and memory; and which CUDA its driver and this program are of.
struct Card {
  std::string product, versions;
};
Card describe_card(Device device);

// Rows kCopyCeiling, kTensorCeiling, kExponentialCeiling and kLaunchCeiling.
std::vector<testing::BenchRow> measure_cuda_ceilings(const testing::BenchOptions& options);

}  // namespace flashgla::bench
