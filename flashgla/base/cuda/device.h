// CUDA devices, memory, streams and events, for base/ alone: others use Context, Queue and memory.h. Streams are
// cudaStream_t, events cudaEvent_t. All throw Error with CUDA's words.
#pragma once

#include <memory>
#include <string>

#include "flashgla/base/context.h"

namespace flashgla::cuda {

int device_count();
// Why the driver gives no device, and the remedy; "" where it does, or where there is no driver.
std::string unusable_driver();
// Throws Error that says what is missing (no device, no driver, one too old) and which devices there are.
void require_device(Device device);
Architecture architecture_of(Device device);
std::string product_name(Device device);
void make_current(Device device);
// The one that was current before; -1 where it was this one, or nothing was changed since there is no such device.
int exchange_current(int index);

std::size_t free_memory(Device device);
std::shared_ptr<void> allocate(std::size_t bytes, Device device);
std::shared_ptr<void> allocate_pinned(std::size_t bytes);
void zero(void* memory, std::size_t bytes, Device device);
void copy(void* dst, const void* src, std::size_t bytes);

// ordered: with the default stream.
void* create_stream(Device device, bool ordered);
void destroy_stream(void* stream);
void synchronize_stream(void* stream);
void zero_queued(void* memory, std::size_t bytes, void* stream);
void copy_queued(void* dst, const void* src, std::size_t bytes, void* stream);

void* create_event(Device device, bool timing);
void destroy_event(void* event);
void record_event(void* event, void* stream);
void hold_back_stream(void* stream, void* event);
bool event_passed(void* event);
void synchronize_event(void* event);
double elapsed_milliseconds(void* begin, void* end);

// What is queued on the stream in between is recorded; end_recording returns a cudaGraphExec_t.
void begin_recording(void* stream);
void* end_recording(void* stream);
void abandon_recording(void* stream);
void launch_graph(void* graph, void* stream);
void destroy_graph(void* graph);

}  // namespace flashgla::cuda
