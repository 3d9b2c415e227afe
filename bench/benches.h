// What `flashgla bench` walks: the benches of the operators and of the whole model, and the machine's ceilings.
#pragma once

#include <vector>

#include "testing/bench.h"

namespace flashgla::bench {

struct Bench {
  const char* name;  // the operator's folder, or the model's task
  void (*run)(const testing::BenchOptions&);
};

// An operator's bench is tests/bench.cpp in its folder.
const std::vector<Bench>& benches();

// One optimizer step, a prompt, one token of decoding, and the reading of a checkpoint, of a whole model
// (bench/model.cpp, decoding.cpp, load.cpp).
void bench_training_step(const testing::BenchOptions& options);
void bench_prefill(const testing::BenchOptions& options);
void bench_decoding(const testing::BenchOptions& options);
void bench_load(const testing::BenchOptions& options);

// What the machine can do at most; every other figure is quoted as a share of these, in one run. On the CPU: the
// vendor's product of two 1024 x 1024 fp32 matrices with its own threading, and the rate at which all threads together
// read memory. On CUDA: a copy of device memory, bf16 products whose operands never leave the chip, and an empty
// kernel; the floor of a row is the longest of its bytes at the first, its FLOPs at the second, and the third.
constexpr const char* kGemmCeiling = "ceiling: fp32 matrix product";
constexpr const char* kReadCeiling = "ceiling: memory read";
constexpr const char* kCopyCeiling = "ceiling: memory copy";
constexpr const char* kTensorCeiling = "ceiling: bf16 matrix product";
constexpr const char* kExponentialCeiling = "ceiling: f32 exponentials";
constexpr const char* kLaunchCeiling = "ceiling: launch";
std::vector<testing::BenchRow> measure_ceilings(const testing::BenchOptions& options);

}  // namespace flashgla::bench
