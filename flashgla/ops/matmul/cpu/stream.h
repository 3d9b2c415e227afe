// The kernel of products with few rows, for whoever shares their columns out among threads.
#pragma once

#include <cstdint>

#include "flashgla/ops/matmul/matmul.h"

namespace flashgla::ops::matmul {

constexpr std::int64_t kMostStreamedRows = 16;

// Rows of a [M,K] in f32 as the kernel reads them beside weights of a dtype: a tensor of this shape, which arrange
// fills.
Shape arranged_shape(const TensorView& a);
void arrange(const TensorView& a, DType weight, const TensorView& arranged);

// Columns [begin, end) of c = a b (+ bias), or c += a b (+ bias), for a arranged and b the transpose of a row-major
// matrix. Whatever the range, a column has the same bits.
void stream_columns(const TensorView& arranged, const TensorView& b, const TensorView& c, const Options& options,
                    std::int64_t begin, std::int64_t end);

}  // namespace flashgla::ops::matmul
