#include "flashgla/base/queue.h"

#include <cstring>

#include "flashgla/base/error.h"
#include "flashgla/base/names.h"
#ifdef FLASHGLA_CUDA
#include "flashgla/base/cuda/device.h"
#endif

namespace flashgla {

#ifdef FLASHGLA_CUDA

Queue::Queue(Device device) : device_(device) {
  if (device.kind == Device::Kind::cuda) cuda::require_device(device);
}

Queue::~Queue() {
  if (device_.kind == Device::Kind::cpu) return;
  resources_.clear();
  for (int lane = borrowed_ ? 1 : 0; lane < 2; ++lane) {
    if (streams_[lane]) cuda::destroy_stream(streams_[lane]);
  }
}

void Queue::activate() const {
  if (device_.kind == Device::Kind::cuda) cuda::make_current(device_);
}

void* Queue::stream(Lane lane) const {
  if (device_.kind == Device::Kind::cpu) return nullptr;
  void*& stream = streams_[static_cast<int>(lane)];
  if (!stream && !(borrowed_ && lane == Lane::compute)) stream = cuda::create_stream(device_, lane == Lane::compute);
  return stream;
}

void Queue::set_stream(void* stream) {
  if (!borrowed_ && streams_[0]) cuda::destroy_stream(streams_[0]);
  streams_[0] = stream;
  borrowed_ = true;
}

void Queue::synchronize(Lane lane) const {
  if (device_.kind == Device::Kind::cuda) cuda::synchronize_stream(stream(lane));
}

void Queue::zero(void* memory, std::size_t bytes, Lane lane) const {
  if (device_.kind == Device::Kind::cuda) {
    cuda::zero_queued(memory, bytes, stream(lane));
  } else {
    std::memset(memory, 0, bytes);
  }
}

void Queue::copy(void* dst, const void* src, std::size_t bytes, Lane lane) const {
  if (device_.kind == Device::Kind::cuda) {
    cuda::copy_queued(dst, src, bytes, stream(lane));
  } else {
    std::memcpy(dst, src, bytes);
  }
}

Event::Event(const Queue& queue, bool timing) : queue_(queue) {
  if (queue.device().kind == Device::Kind::cuda) event_ = cuda::create_event(queue.device(), timing);
}
Event::~Event() {
  if (event_) cuda::destroy_event(event_);
}
void Event::record(Lane lane) {
  if (event_) cuda::record_event(event_, queue_.stream(lane));
}
void Event::hold_back(Lane lane) const {
  if (event_) cuda::hold_back_stream(queue_.stream(lane), event_);
}
bool Event::passed() const { return !event_ || cuda::event_passed(event_); }
void Event::synchronize() const {
  if (event_) cuda::synchronize_event(event_);
}
double Event::elapsed_milliseconds(const Event& earlier) const {
  return event_ ? cuda::elapsed_milliseconds(earlier.event_, event_) : 0.0;
}

#else

Queue::Queue(Device device) : device_(device) {
  if (device.kind == Device::Kind::cuda) {
    throw Error("device " + name_of(device) +
                ": this build of flashgla has no CUDA; configure with -DFLASHGLA_CUDA=ON");
  }
}
Queue::~Queue() = default;
void Queue::activate() const {}
void* Queue::stream(Lane) const { return nullptr; }
void Queue::set_stream(void*) {}
void Queue::synchronize(Lane) const {}
void Queue::zero(void* memory, std::size_t bytes, Lane) const { std::memset(memory, 0, bytes); }
void Queue::copy(void* dst, const void* src, std::size_t bytes, Lane) const { std::memcpy(dst, src, bytes); }

Event::Event(const Queue& queue, bool) : queue_(queue) {}
Event::~Event() = default;
void Event::record(Lane) {}
void Event::hold_back(Lane) const {}
bool Event::passed() const { return true; }
void Event::synchronize() const {}
double Event::elapsed_milliseconds(const Event&) const { return 0.0; }

#endif

}  // namespace flashgla
