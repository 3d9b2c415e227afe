// Which sequence, head and segment of time a block of the walk has (two_pass.h, Segments).
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/common.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/forward/two_pass.h"

namespace flashgla::ops::gated_linear_attention::cuda {

struct PlaceInTime {
  std::int64_t n;  // -1: no tokens are left for the block
  int head, segment;
  int join;  // with the segment before, among all
};

// Of so many heads. Blocks are numbered sequence by sequence, each head's `each` segments side by side; where segments
// differ, place by place, all heads of each.
__device__ __forceinline__ PlaceInTime place_in_time(const Sequences& s, const Segments& segments, unsigned block,
                                                     int heads, int each) {
  PlaceInTime at;
  if (!segments.differ(s)) {
    at.segment = static_cast<int>(block % each);
    block /= each;
    at.head = static_cast<int>(block % heads);
    at.n = block / heads;
    at.join = static_cast<int>(at.n) * (segments.count - 1) + at.segment - 1;
    return at;
  }
  at.head = static_cast<int>(block % heads);
  const int place = static_cast<int>(block / heads);
  const auto first = [&](int n) { return static_cast<int>(segments.first_place(s, n, s.chunk_begin[n])); };
  int low = 0, high = static_cast<int>(s.count);  // first(low) <= place < first(high)
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (first(middle) <= place ? low : high) = middle;
  }
  at.segment = place - first(low);
  at.join = place - low - 1;
  const std::int64_t chunks = s.chunk_begin[low + 1] - s.chunk_begin[low];
  at.n = at.segment > 0 && static_cast<std::int64_t>(at.segment) * segments.chunks >= chunks ? -1 : low;
  return at;
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
