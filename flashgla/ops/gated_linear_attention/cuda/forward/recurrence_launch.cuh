// Launches of the recurrence, with start states of segments where there are several. Compiled in parts:
// core80_two_passes.cu, core90_two_passes.cu, core90_plain.cu.
#pragma once

#include <algorithm>

#include "flashgla/ops/gated_linear_attention/cuda/forward/recurrence.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

template <class Core, int KB, int groups, bool outputs, bool grouped, bool plain>
void launch_blocks(cudaStream_t stream, const Params& p, const Recurrence& run, const Segments& segments) {
  using Plan = RecurrencePlan<Core, KB, groups, outputs, grouped, plain>;
  const std::int64_t slices = (p.value_dim + 64 * groups - 1) / (64 * groups);
  const std::int64_t heads = outputs && !run.backwards ? p.heads * p.group : p.heads;
  const std::int64_t blocks = segments.places(p.sequences) * heads * slices;
  flashgla::cuda::launch(
      "gated_linear_attention recurrence", recurrence_kernel<Core, KB, groups, outputs, grouped, plain>,
      dim3(static_cast<unsigned>(blocks)), Plan::threads, Plan::bytes, stream, kNext<Core>, p, run, segments);
}
template <class Core, int KB, bool outputs, bool plain>
void launch_blocks(cudaStream_t stream, const Params& p, const Recurrence& run, const Segments& segments,
                   int shared_memory) {
  const bool two_groups = p.value_dim > 64 && RecurrencePlan<Core, KB, 2, true, false, plain>::bytes <= shared_memory;
  if (run.backwards && p.group > 1) {
    launch_blocks<Core, KB, 1, outputs, true, plain>(stream, p, run, segments);
  } else if (two_groups) {
    launch_blocks<Core, KB, 2, outputs, false, plain>(stream, p, run, segments);
  } else {
    launch_blocks<Core, KB, 1, outputs, false, plain>(stream, p, run, segments);
  }
}
template <class Core, int KB, bool plain>
void launch_blocks(cudaStream_t stream, const Params& p, const Recurrence& run, const Segments& segments, bool outputs,
                   int shared_memory) {
  outputs ? launch_blocks<Core, KB, true, plain>(stream, p, run, segments, shared_memory)
          : launch_blocks<Core, KB, false, plain>(stream, p, run, segments, shared_memory);
}

// All key blocks, in as many launches as it takes.
template <class Core, bool plain>
void launch_all_blocks(cudaStream_t stream, const Params& p, const TwoPasses& passes, Recurrence run,
                       const Segments& segments, bool outputs) {
  const int blocks = passes.prepared.blocks;
  for (int first = 0; first < blocks; first += passes.blocks_each) {
    run.first_block = first;
    run.adds_parts = first > 0;
    run.ends_parts = first + passes.blocks_each >= blocks;
    switch (std::min(passes.blocks_each, blocks - first)) {
      case 1:
        launch_blocks<Core, 1, plain>(stream, p, run, segments, outputs, passes.shared_memory);
        break;
      case 2:
        launch_blocks<Core, 2, plain>(stream, p, run, segments, outputs, passes.shared_memory);
        break;
      case 3:
        launch_blocks<Core, 3, plain>(stream, p, run, segments, outputs, passes.shared_memory);
        break;
      default:
        launch_blocks<Core, 4, plain>(stream, p, run, segments, outputs, passes.shared_memory);
    }
  }
}

// launch_recurrence of what is plain or not.
template <class Core, bool plain>
void launch_walk(cudaStream_t stream, const Params& p, const TwoPasses& passes, Recurrence run, bool outputs) {
  run.blocks = passes.prepared.blocks;
  run.parts = passes.parts;
  const Segments& segments = passes.segments;
  if (segments.count > 1) launch_segments<Core>(stream, p, run, segments);
  launch_all_blocks<Core, plain>(stream, p, passes, run, segments, outputs);
}
extern template void launch_walk<TensorCore80, false>(cudaStream_t, const Params&, const TwoPasses&, Recurrence, bool);
extern template void launch_walk<TensorCore90, false>(cudaStream_t, const Params&, const TwoPasses&, Recurrence, bool);
extern template void launch_walk<TensorCore90, true>(cudaStream_t, const Params&, const TwoPasses&, Recurrence, bool);

}  // namespace flashgla::ops::gated_linear_attention::cuda
