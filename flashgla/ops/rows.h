// A tensor as rows: all dimensions but the last merged, in row-major order, whatever their strides.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"

namespace flashgla::ops {

class Rows {
 public:
  // The last dimension must be contiguous; a vector is one row.
  explicit Rows(const TensorView& view) {
    length_ = view.rank() > 0 ? view.size(-1) : 1;
    for (int dim = 0; dim + 1 < view.rank(); ++dim) {
      count_ *= view.size(dim);
      if (view.size(dim) == 1) continue;
      // Merge with the dimension before where memory allows: usually one dimension is left.
      if (dims_ > 0 && stride_[dims_ - 1] == view.size(dim) * view.stride[dim]) {
        size_[dims_ - 1] *= view.size(dim);
        stride_[dims_ - 1] = view.stride[dim];
      } else {
        size_[dims_] = view.size(dim);
        stride_[dims_++] = view.stride[dim];
      }
    }
  }

  constexpr std::int64_t count() const { return count_; }
  constexpr std::int64_t length() const { return length_; }

  // Of the row's first element, in elements.
  constexpr std::int64_t offset(std::int64_t row) const {
    if (dims_ <= 1) return row * stride_[0];
    std::int64_t offset = 0;
    for (int dim = dims_ - 1; dim > 0; --dim) {
      offset += row % size_[dim] * stride_[dim];
      row /= size_[dim];
    }
    return offset + row * stride_[0];
  }

  // Whether the rows follow each other without gaps.
  constexpr bool dense() const { return dims_ == 0 || (dims_ == 1 && stride_[0] == length_); }

 private:
  std::int64_t count_ = 1;
  std::int64_t length_ = 1;
  int dims_ = 0;
  std::array<std::int64_t, kMaxRank> size_{};
  std::array<std::int64_t, kMaxRank> stride_{};
};

// A tensor's rows with its element type.
template <class T>
class TypedRows : public Rows {
 public:
  explicit TypedRows(const TensorView& view) : Rows(view), data_(view.as<T>()) {}
  T* operator[](std::int64_t row) const { return data_ + offset(row); }

 private:
  T* data_;
};

// Enough work for one task: a few microseconds at memory speed.
constexpr std::int64_t kElementsPerTask = 16384;

// Rows of one task: a fixed partition, which does not depend on the number of threads.
inline std::int64_t rows_per_task(std::int64_t length) {
  return std::max<std::int64_t>(1, kElementsPerTask / std::max<std::int64_t>(length, 1));
}

// Calls body(row, begin, count): pieces of rows that cover [count, length], in parallel. Where all tensors are dense,
// they count as one long row.
template <class Body>
void for_each_piece(const Context& context, std::initializer_list<const Rows*> tensors, const Body& body) {
  const Rows& first = **tensors.begin();
  const bool dense = std::all_of(tensors.begin(), tensors.end(), [](const Rows* rows) { return rows->dense(); });
  const std::int64_t rows = dense ? 1 : first.count();
  const std::int64_t length = dense ? first.count() * first.length() : first.length();
  if (rows * length == 0) return;
  const std::int64_t pieces = (length + kElementsPerTask - 1) / kElementsPerTask;
  parallel_for_blocks(context, rows * pieces, rows_per_task(length), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t item = begin; item < end; ++item) {
      const std::int64_t start = item % pieces * kElementsPerTask;
      body(item / pieces, start, std::min(kElementsPerTask, length - start));
    }
  });
}

}  // namespace flashgla::ops
