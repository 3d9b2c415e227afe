// Which sequence, head and segment of time a block of the walk has (two_pass.h, Segments).
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/common.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/forward/two_pass.h"

namespace flashgla::ops::gated_linear_attention::cuda {

struct PlaceInTime {
  std::int64_t n;  // -1: nothing is left for the block
  int head, segment;
  int join;  // among all
};

// The last of so many numbers that grow that is not above `at`, which the first is not; all of a warp look for the same
// one, at 32 at a time.
template <class Number>
__device__ __forceinline__ int last_not_above(int at, int count, const Number& number) {
  const int lane = threadIdx.x % 32;
  int first = 0;
#pragma unroll 1
  while (count > 1) {
    const int each = (count + 31) / 32, i = lane * each;
    const int parts = __popc(__ballot_sync(0xffffffffu, i < count && number(first + i) <= at)) - 1;
    first += parts * each;
    count = min(each, count - parts * each);
  }
  return first;
}

// Of so many heads: a segment, and its join with the one before; or (`joins`) one that others follow, and its join with
// the next. Blocks are numbered sequence by sequence, each head's segments side by side; where segments differ, place
// by place or join by join, all heads of each.
template <bool joins>
__device__ __forceinline__ PlaceInTime place_in_time(const Sequences& s, const Segments& segments, unsigned block,
                                                     int heads) {
  PlaceInTime at;
  if (!segments.differ(s)) {
    const unsigned each = segments.count - (joins ? 1 : 0);
    at.segment = static_cast<int>(block % each);
    block /= each;
    at.head = static_cast<int>(block % heads);
    at.n = block / heads;
    at.join = static_cast<int>(at.n) * (segments.count - 1) + at.segment - (joins ? 0 : 1);
    return at;
  }
  at.head = static_cast<int>(block % heads);
  const int number = static_cast<int>(block / heads);
  const auto first = [&](int n) {
    return static_cast<int>(segments.first_join(s, n, s.chunk_begin[n])) + (joins ? 0 : n);
  };
  const int n = last_not_above(number, static_cast<int>(s.count), first);
  at.segment = number - first(n);
  at.join = joins ? number : number - n - 1;
  const std::int64_t chunks = s.chunk_begin[n + 1] - s.chunk_begin[n];
  const int needed = at.segment + (joins ? 1 : 0);  // segments before the first that may be missing
  at.n = needed > 0 && static_cast<std::int64_t>(needed) * segments.chunks >= chunks ? -1 : n;
  return at;
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
