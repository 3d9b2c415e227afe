// What a run takes of its device's memory, and the forms that a step may have to fit into it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "flashgla/nn/pass.h"
#include "flashgla/train/config.h"
#include "flashgla/train/optimizer.h"

namespace flashgla::train {

// All memory of a run, known before its first step.
struct MemoryPlan {
  struct Row {
    std::string group;  // "parameters", "gradients", "optimizer", "data", "states", "activations", "scratch", ...
    std::string label;  // what the bytes are
    std::size_t bytes;
  };
  std::vector<Row> rows;
  std::size_t total() const;
};

// What the model takes whatever a step's form is: parameters, gradients, moments, master.
std::vector<MemoryPlan::Row> rows_of_model(std::int64_t parameters, DType dtype, OptimizerState state);

// How a step is made: less memory costs time.
struct StepForm {
  std::int64_t micro_batch = 0;  // sequences
  nn::Recompute recompute = nn::Recompute::nothing;
};

// The forms that the configuration leaves open, the fastest first: each further micro-batch takes about 1% (gradients
// are read and written once more), what is computed again 4% (activations) or 30% (block).
std::vector<StepForm> step_forms(const TrainConfig& config);

}  // namespace flashgla::train
