#include "flashgla/base/context.h"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <exception>

#ifdef FLASHGLA_CUDA
#include "flashgla/base/cuda/device.h"
#endif

namespace flashgla {

Context::Context(Device device, int threads)
    : queue_(device), threads_(threads > 0 ? threads : omp_get_num_procs()), scratch_(device) {
  architecture_.device = device.kind;
#ifdef FLASHGLA_CUDA
  if (device.kind == Device::Kind::cuda) architecture_ = cuda::architecture_of(device);
#endif
}

TensorView on_device(Context& context, const TensorView& host, const char* label) {
  if (context.device() == host.device) return host;
  const TensorView copy = context.scratch().tensor(host.shape, host.dtype, label);
  if (!context.planning()) context.queue().copy(copy.data, host.data, host.bytes());
  return copy;
}

void parallel_for(const Context& context, std::int64_t tasks, const std::function<void(std::int64_t)>& body) {
  if (tasks <= 0) return;
  const int threads = static_cast<int>(std::min<std::int64_t>(context.threads(), tasks));
  if (threads == 1 || omp_in_parallel()) {
    for (std::int64_t task = 0; task < tasks; ++task) body(task);
    return;
  }
  std::exception_ptr failure;
  std::atomic<bool> failed{false};
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (std::int64_t task = 0; task < tasks; ++task) {
    if (failed.load(std::memory_order_relaxed)) continue;
    try {
      body(task);
    } catch (...) {
      if (!failed.exchange(true)) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

void parallel_for_blocks(const Context& context, std::int64_t items, std::int64_t grain,
                         const std::function<void(std::int64_t, std::int64_t)>& body) {
  const std::int64_t step = std::max<std::int64_t>(grain, 1);
  parallel_for(context, (items + step - 1) / step,
               [&](std::int64_t block) { body(block * step, std::min(items, (block + 1) * step)); });
}

}  // namespace flashgla
