// Launchers of segments of time; instantiations/ has one source a core.
#pragma once

#include <algorithm>

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/forward/segments.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {
namespace segment_ends {

template <class Core, int groups, int VT>
void launch_ends(cudaStream_t stream, const Params& p, const Recurrence& run, const Segments& segments,
                 std::int64_t blocks) {
  using Plan = SegmentEndsPlan<Core, groups, VT>;
  flashgla::cuda::launch("gated_linear_attention segment ends", segment_ends_kernel<Core, groups, VT>,
                         dim3(static_cast<unsigned>(blocks)), Plan::threads, Plan::bytes, stream, kNext<Core>, p, run,
                         segments);
}
template <class Core>
void launch_ends(cudaStream_t stream, const Params& p, const Recurrence& run, const Segments& segments) {
  const bool wide_key = run.blocks > kEndKeyTiles, two_groups = wide_key || p.value_dim > 2 * kTile;
  const int values = tiles_of(p.value_dim), values_each = values == 1 ? 1 : two_groups && !wide_key ? 4 : 2;
  const int keys_each = kEndKeyTiles * (wide_key ? 2 : 1);
  const std::int64_t blocks = segments.joins(p.sequences) * p.heads * ((run.blocks + keys_each - 1) / keys_each) *
                              ((values + values_each - 1) / values_each);
  if (two_groups) {
    values == 1 ? launch_ends<Core, 2, 1>(stream, p, run, segments, blocks)
                : launch_ends<Core, 2, 2>(stream, p, run, segments, blocks);
  } else {
    values == 1 ? launch_ends<Core, 1, 1>(stream, p, run, segments, blocks)
                : launch_ends<Core, 1, 2>(stream, p, run, segments, blocks);
  }
}

}  // namespace segment_ends

template <class Core>
void launch_segments(cudaStream_t stream, const Params& p, const Recurrence& run, const Segments& segments) {
  segment_ends::launch_ends<Core>(stream, p, run, segments);
  const std::int64_t cells = (segments.differ(p.sequences) ? segments.joins(p.sequences) : p.sequences.count) * p.heads;
  const std::int64_t items = cells * tiles_of(p.value_dim) * run.blocks * kCombineItems;
  flashgla::cuda::launch("gated_linear_attention segments", combine_kernel,
                         dim3(static_cast<unsigned>(std::min(items, kMostCombine))), kCombineThreads, 0, stream,
                         kNext<Core>, p, run.start, run.start_scale, run.blocks, segments, static_cast<unsigned>(cells),
                         static_cast<unsigned>(items));
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
