// What all kernels share: a call, its sequences and their tokens. Notation as in reference.cpp; an index counts a
// sequence's tokens from its first one on, those in the past included.
#pragma once

#include <cstdint>

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/base/cuda/vectors.cuh"
#include "flashgla/base/tensor.h"
#include "flashgla/ops/cuda/lines.cuh"

namespace flashgla::ops::long_convolution::cuda {

using flashgla::cuda::from_float;
using flashgla::cuda::to_float;
using ops::cuda::Lines;

// A sequence goes by transforms where its direct sum has more products of pairs than this (twice what a lane of the
// transform's kernel would do in the same time).
constexpr std::int64_t kMostDirect = 512 * 512;
__host__ __device__ constexpr bool by_transforms(std::int64_t length, std::int64_t past) {
  return length * (2 * past + length) > kMostDirect;
}

// A sequence: number n, tokens [begin, begin + length) of its line behind `past` others.
struct Place {
  std::int64_t n, line, begin, length, past;

  __device__ __forceinline__ bool by_transforms() const { return cuda::by_transforms(length, past); }
};

// What every kernel of a call knows. A line is a row of the batch: one sequence, or with cu_seqlens all of them.
template <class T>
struct Call {
  Lines<T> x;
  const float *filter, *skip;  // [rows,D], [D]
  std::int64_t rows;
  const void* past;  // [N,room,D]; null: nothing
  bool wide_past;    // f32
  std::int64_t room;
  const std::int32_t *positions, *cu_seqlens;
  std::int64_t lines, length, channels, sequences;
  bool transforms;  // long sequences are left to the transforms' kernels

  __device__ __forceinline__ std::int64_t boundary(std::int64_t n) const { return cu_seqlens[n]; }
  __device__ __forceinline__ Place place_of(std::int64_t n) const {
    const std::int64_t before = positions == nullptr ? 0 : positions[n];
    if (cu_seqlens == nullptr) return {n, n, 0, length, before};
    return {n, 0, cu_seqlens[n], cu_seqlens[n + 1] - cu_seqlens[n], before};
  }
  // The sequence that token t of a line belongs to.
  __device__ __forceinline__ Place place_at(std::int64_t line, std::int64_t t) const {
    if (cu_seqlens == nullptr) return place_of(line);
    return place_of(ops::cuda::sequence_at(*this, t));
  }
  // x at an index; 0 outside the sequence.
  __device__ __forceinline__ float token(const Place& place, std::int64_t index, std::int64_t d) const {
    if (index < 0 || index >= place.past + place.length) return 0.0f;
    if (index >= place.past) return to_float(*x.at(place.line, place.begin + index - place.past, d));
    const std::int64_t at = (place.n * room + index) * channels + d;
    return wide_past ? static_cast<const float*>(past)[at] : to_float(static_cast<const __nv_bfloat16*>(past)[at]);
  }
  __device__ __forceinline__ float filter_at(const Place& place, std::int64_t j, std::int64_t d) const {
    return j < 0 || j >= place.past + place.length ? 0.0f : filter[j * channels + d];
  }
};

}  // namespace flashgla::ops::long_convolution::cuda
