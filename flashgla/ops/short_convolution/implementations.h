// The table behind the operator. Arguments are validated already.
#pragma once

#include <span>

#include "flashgla/ops/arguments.h"
#include "flashgla/ops/short_convolution/short_convolution.h"

namespace flashgla::ops::short_convolution {

struct Problem {
  DType dtype;  // of x and y
  DType weight_dtype;
  std::int64_t width;  // W
};

struct Implementation {
  const char* name;
  Device::Kind device;
  Support (*supports)(const Problem&, const Architecture&);
  void (*forward)(Context&, const Inputs&, const Outputs&, Activation);
  void (*backward)(Context&, const Inputs&, const OutputGradients&, const InputGradients&, Activation);
  void (*step)(Context&, const TensorView& x, const TensorView& weight, const TensorView& state, const TensorView& y,
               Activation);
};

// Best first, reference last.
std::span<const Implementation> implementations();

extern const Implementation kReference;

// First and one past the last token of sequence n, and the row of [B,T] that it lies in.
struct Span {
  std::int64_t batch, begin, end;
};
Span span_of(const Inputs& inputs, std::int64_t n);

}  // namespace flashgla::ops::short_convolution
