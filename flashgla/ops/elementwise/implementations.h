// The table behind the operators. Arguments are validated already.
#pragma once

#include <span>

#include "flashgla/ops/arguments.h"
#include "flashgla/ops/elementwise/elementwise.h"

namespace flashgla::ops::elementwise {

struct Problem {
  DType in;   // of what is read
  DType out;  // of what is written
};

struct Implementation {
  const char* name;
  Device::Kind device;
  Support (*supports)(const Problem&, const Architecture&);
  void (*add_to)(Context&, const TensorView& a, const TensorView& b, const TensorView& out);  // a may be narrower
  void (*scale)(Context&, const TensorView& x, double factor);
  void (*convert)(Context&, const TensorView& src, const TensorView& dst);
  // Takes its workspace before it looks whether the context is planning.
  void (*column_sum)(Context&, const TensorView& dy, const TensorView& db, bool accumulate);
  void (*silu_forward)(Context&, const TensorView& x, const TensorView& y);
  void (*silu_backward)(Context&, const TensorView& x, const TensorView& dy, const TensorView& dx);
  void (*squared_relu_forward)(Context&, const TensorView& x, const TensorView& y);
  void (*squared_relu_backward)(Context&, const TensorView& x, const TensorView& dy, const TensorView& dx);
  void (*sigmoid_gate_forward)(Context&, const TensorView& gate, const TensorView& x, const TensorView& y);
  void (*sigmoid_gate_backward)(Context&, const TensorView& gate, const TensorView& x, const TensorView& dy,
                                const TensorView& dgate, const TensorView& dx);
  void (*multiply)(Context&, const TensorView& a, const TensorView& b, const TensorView& out);
};

// Best first, reference last.
std::span<const Implementation> implementations();

// view = 0 where elements have 2, 4 or 8 bytes.
void zero_rows_on_device(Context& context, const TensorView& view);

extern const Implementation kCuda, kSimd, kReference;

}  // namespace flashgla::ops::elementwise
