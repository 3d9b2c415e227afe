#include "flashgla/train/memory_plan.h"

#include <algorithm>

namespace flashgla::train {

std::size_t MemoryPlan::total() const {
  std::size_t sum = 0;
  for (const Row& row : rows) sum += row.bytes;
  return sum;
}

std::vector<MemoryPlan::Row> rows_of_model(std::int64_t parameters, DType dtype, OptimizerState state) {
  const auto bytes = [&](std::size_t each) { return static_cast<std::size_t>(parameters) * each; };
  const bool half = state == OptimizerState::half;
  std::vector<MemoryPlan::Row> rows = {{"parameters", name_of(dtype), bytes(size_of(dtype))},
                                       {"gradients", "f32", bytes(4)},
                                       {"optimizer", "moments", bytes(half ? 4 : 8)}};
  if (dtype == DType::bf16) rows.push_back({"optimizer", "master", bytes(state == OptimizerState::full ? 4 : 2)});
  return rows;
}

std::vector<StepForm> step_forms(const TrainConfig& config) {
  const std::int64_t sequences = config.sequences_per_batch();
  std::vector<std::int64_t> sizes;
  for (std::int64_t count = 1; count <= sequences; ++count) {
    if (config.micro_batch == 0 && sequences % count == 0) sizes.push_back(sequences / count);
  }
  if (config.micro_batch > 0) sizes.push_back(config.micro_batch);
  struct Class {
    nn::Recompute recompute;
    double time;
  };
  std::vector<Class> classes = {
      {nn::Recompute::nothing, 0.0}, {nn::Recompute::activations, 0.04}, {nn::Recompute::block, 0.3}};
  if (config.recompute != "automatic") classes = {{nn::recompute_from_name(config.recompute), 0.0}};
  struct Timed {
    double time;
    StepForm form;
  };
  std::vector<Timed> forms;
  for (const Class& one : classes) {
    for (const std::int64_t size : sizes) {
      const std::int64_t further = sequences / size - 1;  // micro-batches beside the first
      forms.push_back({one.time + 0.01 * static_cast<double>(further), {size, one.recompute}});
    }
  }
  std::stable_sort(forms.begin(), forms.end(), [](const Timed& a, const Timed& b) { return a.time < b.time; });
  std::vector<StepForm> result;
  result.reserve(forms.size());
  for (const Timed& one : forms) result.push_back(one.form);
  return result;
}

}  // namespace flashgla::train
