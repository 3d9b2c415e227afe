// Arguments of the kernels for few rows.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "flashgla/base/context.h"

namespace flashgla::ops::matmul::cuda {

// c [m,n] (+)= a [m,k] times the transpose of b [n,k] (+ bias [n]).
template <class A, class B, class C>
struct FewRows {
  const A* a;
  const B* b;
  C* c;
  const void* bias;  // null: none
  bool bias_is_bf16, accumulate;
  bool a_is_aligned;  // four neighbours along k can be loaded at once
  std::int64_t m, n, k;
  std::int64_t a_row, a_column, b_row, c_row, c_column;  // strides
  int chunk;                                             // of k in shared memory
};

#ifdef __CUDACC__
template <class A, class B, class C>
__device__ __forceinline__ void finish(const FewRows<A, B, C>& p, std::int64_t m, std::int64_t n, float value) {
  C& out = p.c[m * p.c_row + n * p.c_column];
  if (p.accumulate) value += flashgla::cuda::to_float(out);
  if (p.bias != nullptr) {
    value += p.bias_is_bf16 ? flashgla::cuda::to_float(static_cast<const __nv_bfloat16*>(p.bias)[n])
                            : static_cast<const float*>(p.bias)[n];
  }
  out = flashgla::cuda::from_float<C>(value);
}
#endif

// On tensor cores, for 5 to 16 rows; a and b in vectors of 16 bytes along k.
void queue_on_tensor_cores(Context& context, const FewRows<float, __nv_bfloat16, float>& p);

}  // namespace flashgla::ops::matmul::cuda
