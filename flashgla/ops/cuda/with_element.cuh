// From a dtype known at run time to a kernel's element type.
#pragma once

#include <cuda_bf16.h>

#include <string>

#include "flashgla/base/error.h"

namespace flashgla::ops::cuda {

// Calls f(element) with one of the type that kernels use for f32 or bf16.
template <class F>
void with_element(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f32:
      return f(float{});
    case DType::bf16:
      return f(__nv_bfloat16{});
    default:
      throw Error(std::string("kernels have f32 and bf16, not ") + name_of(dtype));
  }
}

}  // namespace flashgla::ops::cuda
