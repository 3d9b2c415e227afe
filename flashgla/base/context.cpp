#include "flashgla/base/context.h"

#include <algorithm>

#include "flashgla/base/error.h"
#include "flashgla/base/team.h"
#include "flashgla/base/threads.h"
#ifdef FLASHGLA_CUDA
#include "flashgla/base/cuda/device.h"
#endif

namespace flashgla {

namespace {
int default_threads() {
  static const int threads = choose_threads().threads;
  return threads;
}
}  // namespace

Context::Context(Device device, int threads)
    : queue_(device), threads_(threads > 0 ? threads : default_threads()), scratch_(device) {
  if (threads < 0 || threads > kMostThreads) {
    throw Error("context", "threads", "is " + std::to_string(threads), "0 (all) .. " + std::to_string(kMostThreads));
  }
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
  run_on_team(context.threads(), tasks, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t task = begin; task < end; ++task) body(task);
  });
}

void parallel_for_ranges(const Context& context, std::int64_t items, std::int64_t grain,
                         const std::function<void(std::int64_t, std::int64_t)>& body) {
  Cut cut;
  cut.add(items, grain);
  cut.share_out(context.threads());
  run_on_team(cut, [&](std::size_t, std::int64_t begin, std::int64_t end) { body(begin, end); });
}

void parallel_for_blocks(const Context& context, std::int64_t items, std::int64_t grain,
                         const std::function<void(std::int64_t, std::int64_t)>& body) {
  const std::int64_t step = std::max<std::int64_t>(grain, 1);
  parallel_for(context, (items + step - 1) / step,
               [&](std::int64_t block) { body(block * step, std::min(items, (block + 1) * step)); });
}

}  // namespace flashgla
