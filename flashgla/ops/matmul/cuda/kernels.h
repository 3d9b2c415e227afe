// Launches of the operator's own kernels; cuda/*.cu.
#pragma once

#include "flashgla/base/context.h"
#include "flashgla/ops/matmul/matmul.h"

namespace flashgla::ops::matmul::cuda {

// Random bits that are numbers of either sign around 1 both as bf16 and as f32; bytes are a multiple of 4.
void fill_with_noise(Queue& queue, void* memory, std::size_t bytes);

// high + middle + low == x exactly (subnormal parts aside): an f32 matrix cut into three bf16 ones of the same shape.
// x [rows,columns], any strides; the others row-major.
void split(Queue& queue, const TensorView& x, const TensorView& high, const TensorView& middle, const TensorView& low);

// Any strides, dtypes f32 and bf16 in any mix, any sizes: what nothing else takes.
void multiply_by_tiles(Context& context, const TensorView& a, const TensorView& b, const TensorView& c,
                       const Options& options);

// a of up to 16 rows, b the transpose of a row-major matrix, which is read once. From 5 rows of bf16 on, cuBLASLt was
// measured to be faster.
constexpr std::int64_t kFewRows = 16, kFewNarrowRows = 4;
void multiply_few_rows(Context& context, const TensorView& a, const TensorView& b, const TensorView& c,
                       const Options& options);

}  // namespace flashgla::ops::matmul::cuda
