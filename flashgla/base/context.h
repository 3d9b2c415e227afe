// Context: where an operation runs and what it may use. Passed to every call, never global.
#pragma once

#include <cstdint>
#include <functional>

#include "flashgla/base/arena.h"
#include "flashgla/base/dtype.h"
#include "flashgla/base/queue.h"

namespace flashgla {

// What the processor can do; selection of an implementation is a pure function of (problem, architecture).
struct Architecture {
  Device::Kind device = Device::Kind::cpu;
  int cuda_capability = 0;         // 90 for Hopper; 0 on CPU
  std::int64_t shared_memory = 0;  // bytes a CUDA block may use
  int multiprocessors = 0;
  bool matrix_units = false;  // bf16 products at many times the rate of f32 ones
  bool operator==(const Architecture&) const = default;
};

class Context {
 public:
  // threads 0: as many as the machine offers to this process.
  explicit Context(Device device = Device::cpu(), int threads = 0);

  Device device() const { return queue_.device(); }
  const Architecture& architecture() const { return architecture_; }
  int threads() const { return threads_; }

  // Where the device's work is queued.
  Queue& queue() { return queue_; }
  const Queue& queue() const { return queue_; }
  // CUDA stream (cudaStream_t) that operators queue their work on; null on CPU.
  void* stream() const { return queue_.stream(); }
  void set_stream(void* stream) { queue_.set_stream(stream); }

  // Memory that lives until the enclosing ArenaScope ends.
  Arena& scratch() { return scratch_; }

  // In planning mode an operator validates its arguments, takes its workspace from scratch() and returns.
  bool planning() const { return scratch_.planning(); }

  // Implementation forced by name for every operator that has one so named; empty: automatic.
  const std::string& forced_implementation() const { return forced_implementation_; }
  void force_implementation(std::string name) { forced_implementation_ = std::move(name); }

 private:
  Queue queue_;
  Architecture architecture_;
  int threads_;
  Arena scratch_;
  std::string forced_implementation_;
};

// A host tensor's values on the context's device: the tensor itself where that is the CPU, else a copy in scratch
// memory, queued (contiguous).
TensorView on_device(Context& context, const TensorView& host, const char* label);

// Runs body(task) for every task in [0, tasks) on the context's CPU threads (team.h), dynamically scheduled. What a
// task computes must not depend on which thread runs it: results are then the same bits for any number of threads. The
// first exception thrown by a task is rethrown here.
void parallel_for(const Context& context, std::int64_t tasks, const std::function<void(std::int64_t)>& body);

// As parallel_for, in ranges of neighbouring items, about a multiple of `grain` each: body(begin, end). Each thread
// begins with those that the rule of base/cut.h says; where ranges end depends on chance too, so an item's result must
// not depend on the range that it is in.
void parallel_for_ranges(const Context& context, std::int64_t items, std::int64_t grain,
                         const std::function<void(std::int64_t, std::int64_t)>& body);

// As parallel_for, in blocks of `grain` consecutive items: body(begin, end).
void parallel_for_blocks(const Context& context, std::int64_t items, std::int64_t grain,
                         const std::function<void(std::int64_t, std::int64_t)>& body);

}  // namespace flashgla
