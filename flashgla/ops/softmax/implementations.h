// The table behind the operator. Arguments are validated already.
#pragma once

#include <span>

#include "flashgla/ops/arguments.h"
#include "flashgla/ops/softmax/softmax.h"

namespace flashgla::ops::softmax {

struct Problem {
  DType dtype;
};

struct Implementation {
  const char* name;
  Device::Kind device;
  Support (*supports)(const Problem&, const Architecture&);
  void (*forward)(Context&, const TensorView& x, const TensorView& y);
  void (*backward)(Context&, const TensorView& y, const TensorView& dy, const TensorView& dx);
};

// Best first, reference last.
std::span<const Implementation> implementations();

extern const Implementation kCuda, kSimd, kReference;

}  // namespace flashgla::ops::softmax
