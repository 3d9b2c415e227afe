// AdamW over all parameters of a model: its moments and, beside bf16 parameters, the f32 master copy.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "flashgla/base/context.h"
#include "flashgla/model/safetensors.h"
#include "flashgla/nn/parameter.h"

namespace flashgla::train {

struct OptimizerSettings {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.01;  // of parameters that decay (matrices)
  double clip_norm = 1.0;      // 0: no clipping
};

// What one update did, or why it was not made.
struct UpdateReport {
  bool done = true;
  double gradient_norm = 0.0;  // before clipping
  std::string culprit;         // not done: the first parameter with a NaN or infinite element in its gradient
};

class Optimizer {
 public:
  // Moments start at zero; the master starts as a copy of the parameters. All of it lies in one block of memory.
  Optimizer(Context& context, nn::ParameterStore& parameters, const OptimizerSettings& settings);

  // One update from the gradients times `gradient_scale`. When their global norm is not finite nothing is changed.
  UpdateReport step(double learning_rate, double gradient_scale);

  // The report of an update that is not made because the loss is not finite.
  UpdateReport find_culprit();

  // Every tensor of the state, in a fixed order: what a checkpoint holds.
  std::vector<model::NamedTensor> tensors() const;

  std::int64_t updates() const { return updates_; }
  void set_updates(std::int64_t updates) { updates_ = updates; }  // of a restored state

  std::size_t moment_bytes() const { return moment_bytes_; }
  std::size_t master_bytes() const { return memory_->bytes() - moment_bytes_; }

 private:
  struct Slot {
    nn::Parameter* parameter;
    TensorView first_moment, second_moment, master;
  };

  Context& context_;
  nn::ParameterStore& parameters_;
  OptimizerSettings settings_;
  Tensor memory_;
  std::size_t moment_bytes_ = 0;
  std::vector<Slot> slots_;
  std::int64_t updates_ = 0;
};

}  // namespace flashgla::train
