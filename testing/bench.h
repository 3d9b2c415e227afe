// Timing for benches: medians of repeated runs after a warm-up, and the rows that `flashgla bench` prints.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "flashgla/base/context.h"

namespace flashgla::testing {

// Where a part of a run's time goes on a GPU.
struct OperatorTime {
  std::string name;           // "rms_norm", "matrix products"
  double milliseconds = 0.0;  // of its kernels, none counted twice
  double launches = 0.0;
  double flops = 0.0, bytes = 0.0;  // that it must do and move; 0: not known
};

// One figure. An implementation whose result is wrong gets `refused` and no time.
struct BenchRow {
  std::string operation;  // "gated_linear_attention forward"
  std::string implementation;
  std::string problem;        // "B2 T2048 H4 K128 V128 f32 key gate"
  double milliseconds = 0.0;  // median
  double flops = 0.0;         // model FLOPs of one run, by the formula in the operator's README
  double bytes = 0.0;         // bytes that must move, each tensor once
  double exponentials = 0.0;  // that must be computed, where they may bound it
  double memory = 0.0;        // bytes held beyond the inputs: outputs, gradients, workspace; 0: not counted
  double error = 0.0;         // largest relative error against the float64 reference
  std::string refused;        // why no time is given
  std::string plan;           // the kernels that were chosen, where there are several ways
  std::vector<OperatorTime> operators = {};  // the longest first; of whole models, with BenchOptions::kernels
};

struct BenchOptions {
  Device device;
  int threads = 0;                              // 0: all
  double seconds = 0.5;                         // time spent on each figure after the warm-up
  std::string implementation;                   // only this one; empty: every one that supports the case
  std::string only;                             // only problems whose description contains this; empty: all
  bool sweep = false;                           // the large grid instead of the headline cases
  bool kernels = false;                         // say where a whole model's time goes (bench/kernel_times.h)
  std::function<void(const BenchRow&)> report;  // gets each row as soon as it is there

  bool wants(std::string_view problem) const { return problem.find(only) != std::string_view::npos; }
  // The reference defines, and is not meant to be fast: only when asked for by name.
  bool wants_implementation(std::string_view name) const {
    return implementation.empty() ? name != "reference" : name == implementation;
  }
};

// Median wall-clock milliseconds of run(), at least five runs. CUDA: by device events, from a cold cache.
double median_milliseconds(Context& context, const std::function<void()>& run, double seconds);

// The same of work that other work follows at once, as in a step: on CUDA a run's share of `together` of them, one
// behind the other. That the inputs come from memory is the caller's part.
double median_milliseconds_of(Context& context, const std::function<void()>& run, int together, double seconds);

}  // namespace flashgla::testing
