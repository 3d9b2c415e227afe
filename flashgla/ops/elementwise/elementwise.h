// Operations on each element alone, and the sum over rows that a bias' gradient is.
// Shapes of any rank; all tensors of one call have equal shapes unless stated; any strides, except that the last
// dimension is contiguous. dtypes f64, f32, bf16, f16; arithmetic in f32 (f64 with f64). Throw Error naming the
// argument.
#pragma once

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"

namespace flashgla::ops::elementwise {

// y += x. y has x's dtype, or is f32 beside a bf16 or f16 x.
void add(Context& context, const TensorView& x, const TensorView& y);

// out = a + b, all of one dtype; out may be a or b.
void add_to(Context& context, const TensorView& a, const TensorView& b, const TensorView& out);

// out = a b, all of one dtype; out may be a or b.
void multiply(Context& context, const TensorView& a, const TensorView& b, const TensorView& out);

// x *= factor.
void scale(Context& context, const TensorView& x, double factor);

// view = 0, any dtype.
void zero(Context& context, const TensorView& view);

// dst = src with conversion between floating dtypes (round to nearest even).
void convert(Context& context, const TensorView& src, const TensorView& dst);

// db[n] (+)= sum over rows of dy[row,n]. dy [...,N], db [N] f32 (f64 with f64) and contiguous. Summed over a fixed
// partition of the rows: the same bits for any number of threads.
void column_sum(Context& context, const TensorView& dy, const TensorView& db, bool accumulate);

// y = x sigmoid(x); y may be x.
void silu_forward(Context& context, const TensorView& x, const TensorView& y);

// dx = dy (sigmoid(x) + x sigmoid(x) (1 - sigmoid(x))); dx may be dy.
void silu_backward(Context& context, const TensorView& x, const TensorView& dy, const TensorView& dx);

// y = max(x, 0)^2; y may be x.
void squared_relu_forward(Context& context, const TensorView& x, const TensorView& y);

// dx = 2 max(x, 0) dy; dx may be x or dy.
void squared_relu_backward(Context& context, const TensorView& x, const TensorView& dy, const TensorView& dx);

// y = sigmoid(gate) x; y may be gate or x.
void sigmoid_gate_forward(Context& context, const TensorView& gate, const TensorView& x, const TensorView& y);

// With s = sigmoid(gate): dgate = dy x s (1 - s), dx = dy s. Each may be what it stands beside: gate, x or dy.
void sigmoid_gate_backward(Context& context, const TensorView& gate, const TensorView& x, const TensorView& dy,
                           const TensorView& dgate, const TensorView& dx);

}  // namespace flashgla::ops::elementwise
