// The list of benches that `flashgla bench` walks: one row an operator, in the operator's folder.
#pragma once

#include <vector>

#include "testing/bench.h"

namespace flashgla::ops {

struct Bench {
  const char* name;  // the operator's folder
  void (*run)(const testing::BenchOptions&);
};

const std::vector<Bench>& benches();

// What the machine can do at most; every other figure is quoted as a share of these, in one run. On the CPU: the
// vendor's product of two 1024 x 1024 fp32 matrices with its own threading, and the rate at which all threads together
// read memory. On CUDA: a copy of device memory, bf16 products whose operands never leave the chip, and an empty
// kernel; the floor of a row is the longest of its bytes at the first, its FLOPs at the second, and the third.
constexpr const char* kGemmCeiling = "ceiling: fp32 matrix product";
constexpr const char* kReadCeiling = "ceiling: memory read";
constexpr const char* kCopyCeiling = "ceiling: memory copy";
constexpr const char* kTensorCeiling = "ceiling: bf16 matrix product";
constexpr const char* kLaunchCeiling = "ceiling: launch";
std::vector<testing::BenchRow> measure_ceilings(const testing::BenchOptions& options);

}  // namespace flashgla::ops
