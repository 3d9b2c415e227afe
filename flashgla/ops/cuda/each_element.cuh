// Kernels that do the same to every element: one launch, 16 bytes a load where all tensors are aligned for it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "flashgla/base/cuda/vectors.cuh"
#include "flashgla/ops/cuda/queue_kernel.cuh"
#include "flashgla/ops/cuda/with_element.cuh"
#include "flashgla/ops/rows.h"

namespace flashgla::ops::cuda {

using flashgla::cuda::Vector;

// Where a tensor's rows lie: row i of the merged leading dimensions [outer, middle, inner].
struct RowStrides {
  std::int64_t outer = 0, middle = 0, inner = 0;  // elements
  std::uint32_t middle_count = 1, inner_count = 1;

  // Throws Error when the leading dimensions cannot be merged into three.
  explicit RowStrides(const TensorView& view) {
    std::int64_t counts[3] = {1, 1, 1}, strides[3] = {};
    int level = -1;
    for (int dim = 0; dim + 1 < view.rank(); ++dim) {
      if (view.size(dim) == 1) continue;
      if (level >= 0 && strides[level] == view.size(dim) * view.stride[dim]) {
        counts[level] *= view.size(dim);
      } else if (++level == 3) {
        throw Error("a tensor of shape " + to_string(view.shape) + " whose strides do not follow from each other");
      } else {
        counts[level] = view.size(dim);
      }
      strides[level] = view.stride[dim];
    }
    outer = strides[0];
    if (level < 1) return;
    if (view.numel() / std::max<std::int64_t>(view.size(-1), 1) > 0xffffffffll) {
      throw Error("a tensor of shape " + to_string(view.shape) + " with more than 2^32 rows that do not lie evenly");
    }
    inner = strides[level];
    inner_count = static_cast<std::uint32_t>(counts[level]);
    if (level < 2) return;
    middle = strides[1];
    middle_count = static_cast<std::uint32_t>(counts[1]);
  }

  __device__ __forceinline__ std::int64_t offset(std::int64_t row) const {
    if (inner_count == 1) return row * outer;
    const auto all = static_cast<std::uint32_t>(row), above = all / inner_count, top = above / middle_count;
    return top * outer + (above - top * middle_count) * middle + (all - above * inner_count) * inner;
  }
};

// A tensor of element type T in a kernel.
template <class T>
struct Operand {
  T* data;
  RowStrides rows;

  explicit Operand(const TensorView& view) : data(static_cast<T*>(view.data)), rows(view) {}

  __device__ __forceinline__ T* at(std::int64_t row, std::int64_t column) const {
    return data + rows.offset(row) + column;
  }
  template <int N>
  __device__ __forceinline__ Vector<T, N> load(std::int64_t row, std::int64_t column) const {
    return Vector<T, N>::load(at(row, column));
  }
  template <int N>
  __device__ __forceinline__ void store(std::int64_t row, std::int64_t column, const float (&values)[N]) const {
    Vector<T, N>::of(values).store(at(row, column));
  }
};

// Whether vectors of `elements` may be read at every multiple of as many columns of every row. A tensor of no elements,
// or an absent one, is aligned.
inline bool is_aligned(const TensorView& view, int elements) {
  if (view.numel() == 0 || !view.data) return true;
  const auto bytes = std::min<std::size_t>(16, static_cast<std::size_t>(elements) * size_of(view.dtype));
  bool aligned = reinterpret_cast<std::uintptr_t>(view.data) % bytes == 0;
  for (int dim = 0; dim + 1 < view.rank(); ++dim) {
    aligned = aligned &&
              (view.size(dim) == 1 || static_cast<std::size_t>(view.stride[dim]) * size_of(view.dtype) % bytes == 0);
  }
  return aligned;
}
inline bool are_aligned(std::initializer_list<const TensorView*> views, int elements) {
  return std::all_of(views.begin(), views.end(), [&](const TensorView* view) { return is_aligned(*view, elements); });
}

// Calls run(T(), integral_constant<int, N>()) with the type that kernels use for the dtype and the elements that may be
// read at once of all `tensors`: 16 bytes of T, else one.
template <class Run>
void with_vectors(DType dtype, std::initializer_list<const TensorView*> tensors, const Run& run) {
  with_element(dtype, [&](auto element) {
    constexpr int kElements = flashgla::cuda::kVectorOf<decltype(element)>;
    if (are_aligned(tensors, kElements)) return run(element, std::integral_constant<int, kElements>());
    run(element, std::integral_constant<int, 1>());
  });
}

// [rows, length] elements over blocks, whose threads take vectors of N in their order.
struct ElementGrid {
  static constexpr int kThreads = 256;
  static constexpr int kRounds = 2;  // vectors a thread reads before it writes the first
  static constexpr int kVectors = kThreads * kRounds;
  std::int64_t elements;
  std::int64_t vectors;        // the last of which may be cut short where there is one row
  std::uint32_t vectors_each;  // of a row, where there are several

  ElementGrid(std::int64_t rows, std::int64_t length, int vector)
      : elements(rows * length),
        vectors((rows * length + vector - 1) / vector),
        vectors_each(rows == 1 ? 0 : static_cast<std::uint32_t>(length / vector)) {}
  std::int64_t blocks() const { return (vectors + kVectors - 1) / kVectors; }
};

// Four blocks on a multiprocessor, where what a body reads leaves room for that; one: ptxas else spills.
template <int N, class Body>
constexpr int kBlocksAtOnce = sizeof(typename Body::template Read<N>) <= 48 ? 4 : 1;

// kOneRow: all elements are one row; else a row's length is a multiple of N.
template <int N, bool kOneRow, class Body>
__global__ void __launch_bounds__(ElementGrid::kThreads, kBlocksAtOnce<N, Body>)
    each_element_kernel(Body body, ElementGrid grid) {
  flashgla::cuda::release_next_of_waves();
  flashgla::cuda::wait_for_previous();
  constexpr int kRounds = ElementGrid::kRounds, kThreads = ElementGrid::kThreads;
  const std::int64_t begin = std::int64_t{blockIdx.x} * ElementGrid::kVectors;
  std::int64_t row[kRounds], column[kRounds];
  if constexpr (kOneRow) {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) row[i] = 0, column[i] = (begin + threadIdx.x + i * kThreads) * N;
  } else {
    const std::int64_t above = begin / grid.vectors_each;
    const auto left = static_cast<std::uint32_t>(begin - above * grid.vectors_each) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const std::uint32_t here = left + i * kThreads, down = here / grid.vectors_each;
      row[i] = above + down, column[i] = std::int64_t{here - down * grid.vectors_each} * N;
    }
  }
  const auto is_whole = [&](int i) {
    return kOneRow ? column[i] + N <= grid.elements : begin + threadIdx.x + i * kThreads < grid.vectors;
  };
  if (is_whole(kRounds - 1)) {
    typename Body::template Read<N> read[kRounds];
#pragma unroll
    for (int i = 0; i < kRounds; ++i) read[i] = body.template read<N>(kOneRow ? 0 : row[i], column[i]);
#pragma unroll
    for (int i = 0; i < kRounds; ++i) body.template write<N>(kOneRow ? 0 : row[i], column[i], read[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    if (is_whole(i)) {
      body.template write<N>(row[i], column[i], body.template read<N>(row[i], column[i]));
    } else if (kOneRow) {
      for (std::int64_t one = column[i]; one < grid.elements; ++one) {
        body.template write<1>(0, one, body.template read<1>(0, one));
      }
    }
  }
}

// Queues body for every element of `tensors`, which have one shape and are all that body reads and writes by element.
// Body has a template <int N> struct Read, Read<N> read<N>(row, column) const and
// void write<N>(row, column, const Read<N>&) const: N neighbouring elements at a time.
template <class Body>
void for_each_element(const Context& context, const char* name, const Body& body,
                      std::initializer_list<const TensorView*> tensors) {
  const Rows first(**tensors.begin());
  std::size_t widest = 0;
  bool dense = true;
  for (const TensorView* view : tensors) {
    widest = std::max(widest, size_of(view->dtype));
    dense = dense && Rows(*view).dense();
  }
  const std::int64_t rows = dense ? 1 : first.count(), length = dense ? first.count() * first.length() : first.length();
  if (rows * length == 0) return;
  const auto queue = [&](auto* kernel, int vector) {
    const ElementGrid grid(rows, length, vector);
    queue_kernel(context, name, kernel, grid.blocks(), ElementGrid::kThreads, 0, body, grid);
  };
  const auto queue_vectors = [&]<int N>() {
    rows == 1 ? queue(each_element_kernel<N, true, Body>, N) : queue(each_element_kernel<N, false, Body>, N);
  };
  // 16 bytes of the widest: with 16 of the narrowest, converting bf16 to f32 ran at 0.74 of the copy instead of 0.88.
  const int vector = widest == 2 ? 8 : 4;
  if (widest <= 4 && are_aligned(tensors, vector) && (rows == 1 || length % vector == 0)) {
    return vector == 8 ? queue_vectors.template operator()<8>() : queue_vectors.template operator()<4>();
  }
  rows == 1 ? queue(each_element_kernel<1, true, Body>, 1) : queue(each_element_kernel<1, false, Body>, 1);
}

}  // namespace flashgla::ops::cuda
