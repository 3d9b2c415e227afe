// Tensors in kernels that walk through time, and the sequences that their lines are. A line is a row of the batch: one
// sequence, or with cu_seqlens all of them.
#pragma once

#include <cstdint>

#include "flashgla/base/tensor.h"

namespace flashgla::ops::cuda {

// A tensor [B,T,D], its last dimension contiguous.
template <class T>
struct Lines {
  T* data = nullptr;
  std::int64_t line_stride = 0, token_stride = 0;

  Lines() = default;
  explicit Lines(const TensorView& view)
      : data(static_cast<T*>(view.data)), line_stride(view.stride[0]), token_stride(view.stride[1]) {}
  __device__ __forceinline__ T* at(std::int64_t line, std::int64_t t, std::int64_t d) const {
    return data + line * line_stride + t * token_stride + d;
  }
};

// A sequence: number n, tokens [begin, end) of its line.
struct Place {
  std::int64_t n, begin, end;
};

// The functions below take what a kernel knows of its call: cu_seqlens (null: each line is a sequence), boundary(n) (a
// number of these), sequences, length (of a line).

// Of the sequences of one line, the one that token t belongs to: the last that begins at or before it.
template <class Call>
__device__ __forceinline__ std::int64_t sequence_at(const Call& call, std::int64_t t) {
  std::int64_t low = 0, high = call.sequences;
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (call.boundary(middle) <= t ? low : high) = middle;
  }
  return low;
}

// Sequence n of those of one line.
template <class Call>
__device__ __forceinline__ Place place_of(const Call& call, std::int64_t n) {
  return {n, call.boundary(n), call.boundary(n + 1)};
}

// The sequence that token t of a line belongs to.
template <class Call>
__device__ __forceinline__ Place place_at(const Call& call, std::int64_t line, std::int64_t t) {
  if (call.cu_seqlens == nullptr) return {line, 0, call.length};
  return place_of(call, sequence_at(call, t));
}

// The sequence after `place`'s that has a token at t, its end.
template <class Call>
__device__ __forceinline__ Place place_after(const Call& call, Place place, std::int64_t t) {
  do {
    place = place_of(call, place.n + 1);
  } while (place.end <= t);
  return place;
}

}  // namespace flashgla::ops::cuda
