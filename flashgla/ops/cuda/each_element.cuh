// Kernels that do the same to every element: one launch, 16 bytes a load where all tensors are aligned for it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "flashgla/base/cuda/vectors.cuh"
#include "flashgla/ops/cuda/queue_kernel.cuh"
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

// [rows, length] elements over blocks: `across` neighbouring threads take a row's columns.
struct ElementGrid {
  static constexpr int kThreads = 256;
  static constexpr int kRounds = 2;  // vectors a thread reads before it writes the first
  std::int64_t rows, length;
  std::uint32_t pieces;  // of a row
  int across;

  ElementGrid(std::int64_t rows_count, std::int64_t row_length, int elements) : rows(rows_count), length(row_length) {
    across = kThreads;
    while (rows > 1 && across > 1 && (across / 2) * std::int64_t{kRounds} * elements >= length) across /= 2;
    const std::int64_t piece = std::int64_t{across} * kRounds * elements;
    pieces = static_cast<std::uint32_t>(std::min<std::int64_t>((length + piece - 1) / piece, 0xffffffff));
  }
  std::int64_t blocks() const { return (rows + kThreads / across - 1) / (kThreads / across) * pieces; }
};

// kOneRow: all elements are one row.
template <int N, bool kOneRow, class Body>
__global__ void __launch_bounds__(ElementGrid::kThreads, 1)  // 1: ptxas else spills
    each_element_kernel(Body body, ElementGrid grid) {
  flashgla::cuda::wait_for_previous();
  constexpr int kRounds = ElementGrid::kRounds;
  const int across = kOneRow ? ElementGrid::kThreads : grid.across;
  const std::uint32_t group = kOneRow ? 0 : blockIdx.x / grid.pieces, piece = blockIdx.x - group * grid.pieces;
  const std::int64_t row = kOneRow ? 0 : std::int64_t{group} * (ElementGrid::kThreads / across) + threadIdx.x / across;
  if (!kOneRow && row >= grid.rows) return;
  const std::int64_t first = (std::int64_t{piece} * (kRounds * across) + threadIdx.x % across) * N;
  const std::int64_t apart = static_cast<std::int64_t>(across) * N;
  if (first + (kRounds - 1) * apart + N <= grid.length) {
    typename Body::template Read<N> read[kRounds];
#pragma unroll
    for (int i = 0; i < kRounds; ++i) read[i] = body.template read<N>(row, first + i * apart);
#pragma unroll
    for (int i = 0; i < kRounds; ++i) body.template write<N>(row, first + i * apart, read[i]);
    return;
  }
  for (int i = 0; i < kRounds; ++i) {
    const std::int64_t begin = first + i * apart;
    if (begin + N <= grid.length) {
      body.template write<N>(row, begin, body.template read<N>(row, begin));
    } else {
      for (std::int64_t column = begin; column < grid.length; ++column) {
        body.template write<1>(row, column, body.template read<1>(row, column));
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
  const auto queue = [&](auto* kernel, int elements) {
    const ElementGrid grid(rows, length, elements);
    queue_kernel(context, name, kernel, grid.blocks(), ElementGrid::kThreads, 0, body, grid);
  };
  const auto queue_vectors = [&]<int N>() {
    rows == 1 ? queue(each_element_kernel<N, true, Body>, N) : queue(each_element_kernel<N, false, Body>, N);
  };
  // 16 bytes of the widest: with 16 of the narrowest, converting bf16 to f32 ran at 0.74 of the copy instead of 0.88.
  if (widest == 2 && are_aligned(tensors, 8)) return queue_vectors.template operator()<8>();
  if (widest == 4 && are_aligned(tensors, 4)) return queue_vectors.template operator()<4>();
  queue(each_element_kernel<1, false, Body>, 1);
}

}  // namespace flashgla::ops::cuda
