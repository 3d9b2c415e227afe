// AdamW over all parameters of a model: its moments and, beside bf16 parameters, the f32 master copy. An update is made
// from scalars in the device's memory, so that the host need not wait for it, and may be captured in a graph.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "flashgla/base/context.h"
#include "flashgla/model/safetensors.h"
#include "flashgla/nn/parameter.h"
#include "flashgla/ops/adamw/adamw.h"

namespace flashgla::train {

// What is kept beside each parameter. Bytes an element with bf16 parameters, and with f32 ones.
enum class OptimizerState : std::uint8_t {
  full,          // f32 moments, f32 master: 12, 8
  split_master,  // f32 moments, the master's low bits, which give the same parameters to the bit: 10, 8
  half,          // moments rounded to bf16 stochastically, the master's low bits: 6, 4
};

OptimizerState optimizer_state_from_name(std::string_view name);  // throws Error that lists the names

struct OptimizerSettings {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.01;                   // of parameters that decay (matrices)
  double clip_norm = 1.0;                       // 0: no clipping
  OptimizerState state = OptimizerState::full;  // f64 models keep f64 moments
  std::uint64_t seed = 0;                       // of stochastic rounding
};

// What one update did, or why it was not made.
struct UpdateReport {
  bool done = true;
  double gradient_norm = 0.0;  // before clipping; NaN when it was not done
  std::string culprit;         // not done: the first parameter with a NaN or infinite element in its gradient
};

class Optimizer {
 public:
  // Moments start at zero; the master starts as a copy of the parameters.
  Optimizer(Context& context, nn::ParameterStore& parameters, const OptimizerSettings& settings);

  // One update from the gradients times `gradient_scale`. When their global norm is not finite nothing is changed. The
  // host waits for the report.
  UpdateReport step(double learning_rate, double gradient_scale);

  // The same in parts that make nobody wait. For each update: set_scalars, queue_update (or a graph that holds it),
  // queue_report; and later next_report, which waits until that update is done and names no culprit. At most kInFlight
  // updates may be without their report.
  static constexpr std::int64_t kInFlight = 4;
  void set_scalars(double learning_rate, double gradient_scale);
  // Nothing is changed when the norm or `loss` is not finite: f32 or f64 [1] in the device's memory; absent: finite.
  void queue_update(const TensorView& loss = {});
  void queue_report();
  UpdateReport next_report();
  // Whether next_report need not wait.
  bool report_is_there() const;
  // f64 [1] on the device: whether the last update was made, 1 or 0.
  TensorView made() const;

  // f64 [1] on the device: updates made so far.
  TensorView counter() const;

  // The report of an update that is not made because the loss is not finite. The host waits.
  UpdateReport find_culprit();

  // Every tensor of the state, in a fixed order: what a checkpoint holds.
  std::vector<model::NamedTensor> tensors() const;
  // The memory that they lie in.
  std::vector<TensorView> blocks() const;

  // Made, of those whose report was asked for.
  std::int64_t updates() const { return updates_; }
  void set_updates(std::int64_t updates);  // of a restored state

  std::size_t moment_bytes() const { return first_moments_->bytes() + second_moments_->bytes(); }
  std::size_t master_bytes() const { return master_ ? master_->bytes() : 0; }

 private:
  struct Slot {  // of one update in flight, in pinned memory
    ops::adamw::StepScalars sent, received;
  };

  Context& context_;
  nn::ParameterStore& parameters_;
  ops::adamw::Settings settings_;
  Tensor first_moments_, second_moments_, master_, boundaries_, scalars_, sum_of_squares_;  // master_ may be absent
  std::shared_ptr<void> pinned_;
  Slot* slots_ = nullptr;
  std::array<std::unique_ptr<Event>, kInFlight> reported_;
  std::int64_t queued_ = 0;  // reports
  std::int64_t read_ = 0;
  std::int64_t updates_ = 0;
};

}  // namespace flashgla::train
