// What `flashgla bench --save` writes and `--compare` reads: the rows of one run, with what is needed to make sense of
// them later. And the least time that a row can take on that machine.
#pragma once

#include <string>
#include <vector>

#include "testing/bench.h"

namespace flashgla::cli {

// The rows that other rows of the same run are compared with.
struct Ceilings {
  bool cuda = false;
  double flops = 0.0;         // FLOP/s: of the vendor's fp32 product of 1024^3 on the CPU, of bf16 products on CUDA
  double bandwidth = 0.0;     // bytes/s: read on the CPU, copied on CUDA (read + written)
  double exponentials = 0.0;  // a second; 0: not measured
  double launch = 0.0;        // seconds of an empty kernel; 0 on the CPU

  // Takes the figure when the row is one of the ceilings.
  void note(const testing::BenchRow& row);
};

// The least time that a row can take: the longest of its FLOPs, its bytes, its exponentials and one launch at the
// ceilings; 0: unknown.
// On the CPU, where the ceiling of FLOPs is of f32, bf16 may take less.
double floor_milliseconds(const testing::BenchRow& row, const Ceilings& ceilings);
double floor_milliseconds(const testing::OperatorTime& part, const Ceilings& ceilings);
// The floor over the measured time; 0: unknown.
double share_of_floor(const testing::BenchRow& row, const Ceilings& ceilings);

struct BenchFile {
  std::string device;   // "cpu", "cuda:0"
  std::string machine;  // what the device calls itself: "NVIDIA H200", "AMD EPYC ..."
  int threads = 0;      // of the CPU
  std::string commit;   // of the sources that the program was built from; "-dirty" when they were changed
  std::string date;     // "2026-11-23", UTC
  std::string command;
  std::vector<testing::BenchRow> rows;
};

// A file of this run, without rows.
BenchFile describe_run(Device device, int threads, const std::string& command);

// Rows as JSON: an array of objects.
std::string rows_to_json(const std::vector<testing::BenchRow>& rows, const Ceilings& ceilings);
// As rows_to_json writes them. FLOPs and bytes that a row leaves out are taken from the row of `ours` of the same
// operation and problem. Throws Error that begins with `source`.
std::vector<testing::BenchRow> rows_from_json(const std::string& json, const std::string& source,
                                              const std::vector<testing::BenchRow>& ours = {});

void save_bench_file(const std::string& path, const BenchFile& file);
BenchFile load_bench_file(const std::string& path);  // throws Error

// A row that is slower than it was: by milliseconds on a GPU, on a CPU by the share of the floor (of each run's own
// ceilings, since machines differ and so do their neighbours).
struct Slower {
  testing::BenchRow row;
  double before, now;  // milliseconds, or shares of the floor
  double loss;         // now takes 1 + loss times as long
};
struct Comparison {
  std::vector<Slower> slower;  // by more than the given share, the worst first
  int compared = 0;            // rows that both runs have
};
// Throws Error when the runs cannot be compared: a CPU with a GPU, or GPUs of other names.
Comparison compare(const BenchFile& before, const BenchFile& now, double share);

}  // namespace flashgla::cli
