// Launches of the small operators' kernels. Every kernel launched so calls wait_for_previous() first of all.
#pragma once

#include <string>

#include "flashgla/base/context.h"
#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/base/error.h"

namespace flashgla::ops::cuda {

// Queues kernel(arguments...) on the context's stream with `blocks` along x; nothing when there are none.
template <class... Parameters, class... Arguments>
void queue_kernel(const Context& context, const char* name, void (*kernel)(Parameters...), std::int64_t blocks,
                  int threads, int shared, const Arguments&... arguments) {
  if (blocks == 0) return;
  if (blocks > 0x7fffffff) throw Error(std::string(name) + ": too large for one launch");
  using flashgla::cuda::Begin;
  const Begin begin = context.architecture().cuda_capability == 90 ? Begin::beside_previous : Begin::after_previous;
  flashgla::cuda::launch(name, kernel, dim3(static_cast<unsigned>(blocks)), threads, shared,
                         static_cast<cudaStream_t>(context.stream()), begin, arguments...);
}

}  // namespace flashgla::ops::cuda
