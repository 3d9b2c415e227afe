#include "flashgla/base/graph.h"

#include <utility>

#ifdef FLASHGLA_CUDA
#include "flashgla/base/cuda/device.h"
#endif

namespace flashgla {

#ifdef FLASHGLA_CUDA

Graph::Graph(const Queue& queue, std::function<void()> work) : queue_(queue) {
  if (queue.device().kind == Device::Kind::cpu) {
    work_ = std::move(work);
    return;
  }
  queue.activate();
  cuda::begin_recording(queue.stream());
  try {
    work();
  } catch (...) {
    cuda::abandon_recording(queue.stream());
    throw;
  }
  graph_ = cuda::end_recording(queue.stream());
}

Graph::~Graph() {
  if (graph_) cuda::destroy_graph(graph_);
}

void Graph::launch() const {
  if (graph_) {
    cuda::launch_graph(graph_, queue_.stream());
  } else {
    work_();
  }
}

#else

Graph::Graph(const Queue& queue, std::function<void()> work) : queue_(queue), work_(std::move(work)) {}
Graph::~Graph() = default;
void Graph::launch() const { work_(); }

#endif

}  // namespace flashgla
