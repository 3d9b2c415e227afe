// Queue: the order in which a device does its work, and how the host waits for it, copies to and from it, and keeps
// what belongs to one device for long (library handles, plans). On the CPU work is done when a call returns.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <typeindex>

#include "flashgla/base/dtype.h"

namespace flashgla {

// Work queued on `copies` runs beside `compute`; an Event orders the two.
enum class Lane : std::uint8_t { compute, copies };

class Queue {
 public:
  // Throws Error naming the device when it is not there, its driver is too old, or this build has no CUDA.
  explicit Queue(Device device);
  ~Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  Device device() const { return device_; }

  // Makes the device the calling thread's current one, which launches and allocations go to. Nothing on the CPU.
  void activate() const;

  // cudaStream_t of a lane, made at its first use; null on the CPU. The compute lane is ordered with CUDA's default
  // stream (synchronous copies of copy_memory), the copy lane with nothing but events.
  void* stream(Lane lane = Lane::compute) const;
  // Another library's stream as the compute lane; it must outlive its use here.
  void set_stream(void* stream);

  // The host waits until everything queued on the lane has been done.
  void synchronize(Lane lane = Lane::compute) const;

  // Queued; `memory`, `dst` and `src` must live until it is done. Host memory must come from allocate_pinned_memory for
  // a copy that does not make the host wait.
  void zero(void* memory, std::size_t bytes, Lane lane = Lane::compute) const;
  void copy(void* dst, const void* src, std::size_t bytes, Lane lane = Lane::compute) const;

  // The one object of type T that belongs to this queue, made by T(queue) at its first use: a library's handle and
  // workspace, a cache of plans.
  template <class T>
  T& resource() {
    std::shared_ptr<void>& slot = resources_[std::type_index(typeid(T))];
    if (!slot) slot = std::make_shared<T>(*this);
    return *static_cast<T*>(slot.get());
  }

 private:
  Device device_;
  mutable void* streams_[2] = {};
  bool borrowed_ = false;  // the compute lane is somebody else's
  std::map<std::type_index, std::shared_ptr<void>> resources_;
};

// A mark in a queue's order. On the CPU always passed.
class Event {
 public:
  // timing: elapsed_milliseconds may be asked.
  explicit Event(const Queue& queue, bool timing = false);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(Lane lane = Lane::compute);  // everything queued on the lane so far
  void hold_back(Lane lane) const;         // what is queued on the lane from now on waits for the mark
  bool passed() const;
  void synchronize() const;                                 // the host waits for the mark
  double elapsed_milliseconds(const Event& earlier) const;  // both recorded and passed; 0 on the CPU

 private:
  const Queue& queue_;
  void* event_ = nullptr;
};

}  // namespace flashgla
