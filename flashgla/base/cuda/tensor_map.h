// Tensor maps: how TMA is told where the boxes of a tensor lie.
#pragma once

#include <cuda.h>

#include <array>

namespace flashgla::cuda {

// Of bf16 elements: sizes in elements, the first dimension contiguous; strides of the other three in bytes, multiples
// of 16 and not 0. Boxes of 64 elements by `rows` of the second dimension, in the 128-byte swizzle; zeros beyond the
// sizes. Throws Error that begins with `operation` where the driver makes none.
CUtensorMap tensor_map(const char* operation, void* data, const std::array<cuuint64_t, 4>& sizes,
                       const std::array<cuuint64_t, 3>& strides, int rows);

// Of f32 (wide) or bf16 elements, likewise, but for boxes of so many elements, 16 bytes or a multiple, by so many of
// the second and of the third dimension, one behind the other; with `swizzled`, of 32 bytes, in the 32-byte swizzle.
CUtensorMap tensor_map_of_rows(const char* operation, bool wide, void* data, const std::array<cuuint64_t, 4>& sizes,
                               const std::array<cuuint64_t, 3>& strides, const std::array<int, 3>& box,
                               bool swizzled = false);

}  // namespace flashgla::cuda
