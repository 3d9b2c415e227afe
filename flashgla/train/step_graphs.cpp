#include "flashgla/train/step_graphs.h"

namespace flashgla::train {

void StepGraphs::run(const Key& key, const std::function<void()>& work) {
  const auto [row, first] = graphs_.try_emplace(key);
  std::unique_ptr<Graph>& graph = row->second;
  if (!graph && !first && enabled_ && recorded_ < kMost) {
    graph = std::make_unique<Graph>(queue_, work);
    ++recorded_;
  }
  if (graph) {
    graph->launch();
  } else {
    work();
  }
}

}  // namespace flashgla::train
