// Matrix product: c = a b (+ bias), c += a b (+ bias), or c = addend + a b (+ bias).
//
//     c[m,n] = (accumulate ? c[m,n] : addend[m,n]) + sum_k a[m,k] b[k,n] + bias[n]
//
// The sum over k is in f32 (f64 with f64), whatever the inputs' dtype, in an order that the shape alone decides: the
// result is the same bits for any number of threads.
#pragma once

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"

namespace flashgla::ops::matmul {

struct Options {
  bool accumulate = false;
  TensorView bias;    // absent, or contiguous [N]; c's dtype, or f32 or bf16 beside an f32 or bf16 c
  TensorView addend;  // absent: zero; as c, its rows or columns contiguous as c's; may be c; not with accumulate
};
// The same product with its addend, if there is one, copied into c.
Options added_in_place(Context& context, const TensorView& c, const Options& options);

// a [M,K], b [K,N], c [M,N]; in each of the three one of the two strides is 1, so that a transpose is a view:
//     linear layer       y = run(x, w.transpose(0, 1))       x [M,K], w [N,K]
//     its input          dx = run(dy, w)
//     its weight         dw += run(dy.transpose(0, 1), x)    dw f32 beside bf16 dy and x
// dtypes (a, b, c): (f32,f32,f32) (bf16,bf16,bf16) (bf16,bf16,f32) (f32,bf16,f32) (f64,f64,f64).
// c must not overlap a, b or bias, nor an addend that is not c itself. K may be 0 (a sum over nothing). Products with M
// <= 16 and b the transpose of a row-major matrix read b once at memory speed (decoding). Throws Error naming the
// argument.
void run(Context& context, const TensorView& a, const TensorView& b, const TensorView& c, const Options& options = {});

}  // namespace flashgla::ops::matmul
