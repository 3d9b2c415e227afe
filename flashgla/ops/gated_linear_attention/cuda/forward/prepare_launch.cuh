// Launcher of the preparation; instantiations/ has one source a core.
#pragma once

#include <algorithm>

#include "flashgla/base/context.h"
#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/forward/prepare.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

template <class Core>
void launch_forward_prepare(Context& context, const Params& p, const Prepared& prepared) {
  const std::int64_t blocks = p.sequences.most_chunks * p.heads * p.group;
  if (blocks == 0) return;
  // Key tiles at once where there are few blocks. Where a multiprocessor has several, those of one tile after the other
  // are faster: they do not wait for one another.
  const Architecture& device = context.architecture();
  const std::int64_t fit = device.shared_memory / kPrepareBytes,
                     room = kPrepareGroups * device.multiprocessors / blocks;
  const int groups =
      static_cast<int>(std::min<std::int64_t>({prepared.blocks, kPrepareGroups, fit, std::max<std::int64_t>(room, 1)}));
  const auto launch = [&](auto kernel) {
    flashgla::cuda::launch("gated_linear_attention forward prepare", kernel, dim3(static_cast<unsigned>(blocks)),
                           groups * kGroupThreads, groups * kPrepareBytes, static_cast<cudaStream_t>(context.stream()),
                           kNext<Core>, p, prepared);
  };
  with_gates_as<Core>(p, [&](auto gates) { launch(forward_prepare_kernel<Core, decltype(gates)::value>); });
}
}  // namespace flashgla::ops::gated_linear_attention::cuda
