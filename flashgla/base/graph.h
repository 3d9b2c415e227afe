// Graph: work of a queue's compute lane, recorded once and launched as a whole, which costs the host one call however
// many operations it holds. On the CPU the work itself, done again by every launch.
#pragma once

#include <functional>

#include "flashgla/base/queue.h"

namespace flashgla {

class Graph {
 public:
  // Calls `work` once; what it queues on the compute lane is recorded, with the addresses and values given then, and
  // not done. It may not allocate, wait, or use the copy lane. On the CPU `work` is kept for launch(). Throws what
  // `work` throws, and Error for what cannot be recorded.
  Graph(const Queue& queue, std::function<void()> work);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void launch() const;

 private:
  const Queue& queue_;
  std::function<void()> work_;  // on the CPU
  void* graph_ = nullptr;
};

}  // namespace flashgla
