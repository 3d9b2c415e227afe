// What kernels that read 16 bytes at a time ask of a matrix.
#pragma once

#include <cstdint>

#include "flashgla/base/tensor.h"

namespace flashgla::ops {

// Whether each row of a matrix [rows, columns], whose columns are neighbours, is whole 16-byte vectors from an address
// that is a multiple of 16 on.
inline bool rows_are_aligned(const TensorView& view) {
  const auto whole = [&](std::int64_t elements) {
    return elements * static_cast<std::int64_t>(size_of(view.dtype)) % 16 == 0;
  };
  return reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 && whole(view.size(-1)) &&
         (view.size(0) <= 1 || whole(view.stride[0]));
}

}  // namespace flashgla::ops
