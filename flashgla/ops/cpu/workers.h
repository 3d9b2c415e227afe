// Tasks that need workspace: a few workers, each with memory of its own, share the items between them. What an item
// computes must not depend on its worker, as with parallel_for.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "flashgla/base/context.h"

namespace flashgla::ops {

class Workers {
 public:
  // Takes a workspace of `bytes` for each worker from the context's scratch.
  Workers(Context& context, std::int64_t items, std::size_t bytes)
      : context_(context),
        items_(items),
        count_(std::min<std::int64_t>(items, context.threads())),
        stride_((bytes + 63) / 64 * 64) {
    memory_ =
        static_cast<std::byte*>(context.scratch().allocate(stride_ * static_cast<std::size_t>(count_), "workspace"));
  }

  // body(item, the worker's memory), for every item; the memory holds whatever the last item left there.
  template <class Body>
  void run(Body&& body) const {
    std::atomic<std::int64_t> next{0};
    parallel_for(context_, count_, [&](std::int64_t worker) {
      std::byte* memory = memory_ + stride_ * static_cast<std::size_t>(worker);
      for (std::int64_t item = next++; item < items_; item = next++) body(item, memory);
    });
  }

 private:
  const Context& context_;
  std::int64_t items_;
  std::int64_t count_;
  std::size_t stride_;
  std::byte* memory_;
};

// Hands out typed pieces of a worker's memory; constructed on null it only counts.
class Carver {
 public:
  explicit Carver(std::byte* memory) : memory_(memory) {}
  template <class T>
  T* take(std::int64_t count) {
    const std::size_t begin = used_;
    used_ += (static_cast<std::size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + begin);
  }
  std::size_t used() const { return used_; }

 private:
  std::byte* memory_;
  std::size_t used_ = 0;
};

}  // namespace flashgla::ops
